"""Makes the experts of a model's layers on a GPU."""

from collections.abc import Callable

from torch import Tensor

from services.engine.kernels.gpu.packed_codes import can_pack
from services.engine.kernels.gpu.stacked_experts import CodedExperts, StackedExperts
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes
from services.engine.quantization.codes import stacked


def stacked_experts(experts: Experts, down: Tensor) -> StackedExperts:
    """Makes room for experts in a GPU's kernels, as `MakeExperts` says. down: one expert's second weight, [hidden,
    width].
    """
    hidden, width = down.shape
    return StackedExperts(experts.routing, hidden, width, down, experts.clamp)


def coded_experts(experts: Experts, read: Callable[[int], ExpertCodes | None]) -> CodedExperts | None:
    """Makes a GPU's kernels for experts whose weights are codes; None: there are none for them, or they are not stored
    in codes, or not all in the same way.

    read: returns the codes of an expert, which are whole and are taken over; None: it is stored in numbers.
    """
    kernel = CodedExperts(experts.routing, experts.clamp)

    def put(expert: int, codes: ExpertCodes | None) -> bool:
        """Packs an expert, whose codes nobody holds then."""
        if codes is None:
            return False
        gate_up, down = stacked(codes.matrices[:2]), codes.matrices[2]
        if len(gate_up) > 1 or any(one.order is not None or not can_pack(one) for one in (*gate_up, down)):
            return False
        return kernel.put_codes(expert, gate_up[0], down, codes.gate_up_bias, codes.down_bias)

    return kernel if all(put(expert, read(expert)) for expert in range(experts.num_experts)) else None
