"""Makes the experts of a model's layers on a GPU."""

from torch import Tensor

from services.engine.kernels.gpu.stacked_experts import StackedExperts
from services.engine.models.experts_config import Experts


def stacked_experts(experts: Experts, down: Tensor) -> StackedExperts:
    """Makes room for experts in a GPU's kernels, as `MakeExperts` says. down: one expert's second weight, [hidden,
    width].
    """
    hidden, width = down.shape
    return StackedExperts(experts.routing, hidden, width, down, experts.clamp)
