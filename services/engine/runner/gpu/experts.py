"""Makes the experts of a model's layers on a GPU."""

from torch import Tensor

from services.engine.kernels.gpu.routing import Choice
from services.engine.kernels.gpu.stacked_experts import StackedExperts
from services.engine.models.experts_config import Experts


def stacked_experts(experts: Experts, down: Tensor) -> StackedExperts:
    """Makes room for experts in a GPU's kernels, as `MakeExperts` says. down: one expert's second weight, [hidden,
    width].
    """
    choice = Choice(
        experts.num_experts,
        experts.top_k,
        experts.scoring.value,
        experts.normalized,
        experts.scaling,
        experts.num_groups,
        experts.groups_kept,
        experts.sums_best_two,
    )
    swiglu = None if experts.swiglu_limit is None else (experts.swiglu_limit, experts.swiglu_alpha)
    hidden, width = down.shape
    return StackedExperts(choice, hidden, width, down, swiglu)
