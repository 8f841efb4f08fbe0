"""The tensors of a layer with experts: their names in the checkpoints of each family, their shapes, a rank's shares.

Checkpoints have a matrix for each expert, or gpt-oss' tensors of all experts, in which gate and up take turns:

    gate_up_proj [experts, hidden, 2 * intermediate]   down_proj [experts, intermediate, hidden]
"""

from dataclasses import dataclass

from services.engine.models.experts_config import Experts
from services.engine.models.model_config import Shard
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


def expert_shares(names: ExpertNames, experts: Experts, shard: Shard) -> Shares:
    """Returns the shares that one rank reads: its columns of each expert, or its experts whole. The router is whole on
    every rank. experts: those of the whole model.

    A rank that has columns reads the gates and ups of gpt-oss whole, since their columns are in the tensor's last
    dimension, and takes its columns of them.
    """
    shares: Shares = {}
    if experts.shared_size:
        shares |= _gated_shares(names.of_shared(), shard.part(experts.shared_size))
    own, columns = shard.experts(experts.num_experts), shard.expert_columns(experts.intermediate_size)
    if names.in_one_tensor:
        return shares | (_experts_in_one(names, own) if shard.expert_parallel else _columns_in_one(names, columns))
    for expert in range(experts.num_experts):
        of_expert = names.of_expert(expert)
        shares |= _gated_shares(of_expert, columns) if expert in own else _gated_of_others(of_expert)
    return shares


def _gated_shapes(names: tuple[str, str, str], inner: int, hidden: int) -> Shapes:
    gate, up, down = names
    shapes = linear_shapes(gate, inner, hidden, False) | linear_shapes(up, inner, hidden, False)
    return shapes | linear_shapes(down, hidden, inner, False)


def _gated_shares(names: tuple[str, str, str], own: range) -> Shares:
    gate, up, down = names
    shares = shares_of_outputs(gate, own, False) | shares_of_outputs(up, own, False)
    return shares | shares_of_inputs(down, own, False)


def _gated_of_others(names: tuple[str, str, str]) -> Shares:
    return {f"{name}.weight": None for name in names}


def _columns_in_one(names: ExpertNames, columns: range) -> Shares:
    down = f"{names.experts}.down_proj"
    shares: Shares = {down: Share(columns=slice(columns.start, columns.stop))}
    return shares | {f"{down}_bias": None} if columns.start else shares


def _experts_in_one(names: ExpertNames, own: range) -> Shares:
    share = Share(rows=(slice(own.start, own.stop),))
    return {
        f"{names.experts}.{product}{end}": share for product in ("gate_up_proj", "down_proj") for end in ("", "_bias")
    }


def _shapes_in_one(names: ExpertNames, experts: Experts, hidden: int) -> Shapes:
    count, inner, prefix = experts.num_experts, experts.intermediate_size, f"{names.experts}."
    return {
        f"{prefix}gate_up_proj": (count, hidden, 2 * inner),
        f"{prefix}gate_up_proj_bias": (count, 2 * inner),
        f"{prefix}down_proj": (count, inner, hidden),
        f"{prefix}down_proj_bias": (count, hidden),
    }
