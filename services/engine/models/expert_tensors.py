"""The tensors of a layer with experts: their names in the checkpoints of each family, their shapes, a rank's shares.

Checkpoints have a matrix for each expert, or gpt-oss' tensors of all experts, in which gate and up take turns:

    gate_up_proj [experts, hidden, 2 * intermediate]   down_proj [experts, intermediate, hidden]
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.experts_config import Experts
from services.engine.models.shapes import Shapes, Share, Shares, linear_shapes, shares_of_inputs, shares_of_outputs


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the tensors of a layer's experts, after the layer's prefix."""

    router: str
    experts: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    in_one_tensor: bool = False  # gpt-oss' tensors of all experts

    @property
    def correction(self) -> str:
        """Returns the name of what is added to scores for the choice."""
        return f"{self.router}.e_score_correction_bias"

    def of_expert(self, expert: int) -> tuple[str, str, str]:
        """Returns the names of an expert's gate, up and down products."""
        prefix = f"{self.experts}.{expert}."
        return prefix + self.gate, prefix + self.up, prefix + self.down

    def of_shared(self) -> tuple[str, str, str]:
        """Returns the names of the products of the expert that every token takes."""
        return f"{self.shared}.gate_proj", f"{self.shared}.up_proj", f"{self.shared}.down_proj"


MIXTRAL = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2")
QWEN = ExpertNames("mlp.gate", "mlp.experts", shared="mlp.shared_expert")
DEEPSEEK = ExpertNames("mlp.gate", "mlp.experts")
GPT_OSS = ExpertNames("mlp.router", "mlp.experts", in_one_tensor=True)


def expert_shapes(names: ExpertNames, experts: Experts, hidden: int) -> Shapes:
    """Returns the shapes of the tensors of a layer with experts."""
    shapes = linear_shapes(names.router, experts.num_experts, hidden, experts.biases)
    if experts.corrected:
        shapes[names.correction] = (experts.num_experts,)
    if experts.shared_size:
        shapes |= _gated_shapes(names.of_shared(), experts.shared_size, hidden)
    if experts.shared_gate:
        shapes |= linear_shapes(names.shared_gate, 1, hidden, False)
    if names.in_one_tensor:
        return shapes | _shapes_in_one(names, experts, hidden)
    for expert in range(experts.num_experts):
        shapes |= _gated_shapes(names.of_expert(expert), experts.intermediate_size, hidden)
    return shapes


def expert_shares(names: ExpertNames, experts: Experts, part: Callable[[int], range]) -> Shares:
    """Returns the shares that one rank reads: its columns of each expert. The router is whole on every rank.

    part: returns the rank's places of so many. A rank reads the gates and ups of gpt-oss whole, since their columns are
    in the tensor's last dimension, and takes its columns of them.
    """
    shares: Shares = {}
    if experts.shared_size:
        shares |= _gated_shares(names.of_shared(), part(experts.shared_size))
    own = part(experts.intermediate_size)
    if names.in_one_tensor:
        columns = Share(columns=slice(own.start, own.stop))
        shares |= {f"{names.experts}.down_proj": columns}
        return shares | ({f"{names.experts}.down_proj_bias": None} if own.start else {})
    for expert in range(experts.num_experts):
        shares |= _gated_shares(names.of_expert(expert), own)
    return shares


def _gated_shapes(names: tuple[str, str, str], inner: int, hidden: int) -> Shapes:
    gate, up, down = names
    shapes = linear_shapes(gate, inner, hidden, False) | linear_shapes(up, inner, hidden, False)
    return shapes | linear_shapes(down, hidden, inner, False)


def _gated_shares(names: tuple[str, str, str], own: range) -> Shares:
    gate, up, down = names
    shares = shares_of_outputs(gate, own, False) | shares_of_outputs(up, own, False)
    return shares | shares_of_inputs(down, own, False)


def _shapes_in_one(names: ExpertNames, experts: Experts, hidden: int) -> Shapes:
    count, inner, prefix = experts.num_experts, experts.intermediate_size, f"{names.experts}."
    return {
        f"{prefix}gate_up_proj": (count, hidden, 2 * inner),
        f"{prefix}gate_up_proj_bias": (count, 2 * inner),
        f"{prefix}down_proj": (count, inner, hidden),
        f"{prefix}down_proj_bias": (count, hidden),
    }
