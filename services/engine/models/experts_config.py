"""The experts of a model's layers: how many there are, how a token's are chosen, and which layers have them.

Each function that reads config.json takes its settings and the number of layers, and raises ModelError. None of them
needs torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from services.engine.kernels.routing_numbers import RoutingNumbers, Scores
from services.engine.models.model_config import check_columns
from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, of which each token takes `top_k`, and the numbers that choose them."""

    num_experts: int
    top_k: int
    intermediate_size: int  # columns between the two products of one expert
    layers: tuple[int, ...]  # those that have experts; the others have one MLP
    scores: Scores = Scores.SOFTMAX
    normalized: bool = False  # the chosen experts' weights are divided by their sum
    scaling: float = 1.0  # factor on the weights
    num_groups: int = 1  # of experts that are next to each other
    groups_kept: int = 1  # of each token; it chooses among their experts alone
    sums_best_two: bool = False  # the score of a group: the sum of its two highest, else its highest
    corrected: bool = False  # a learned number is added to each score for the choice, and not for the weights
    wide_logits: bool = False  # the router's product is float32 whatever the model's dtype
    shared_size: int = 0  # columns of the expert that every token takes, 0: there is none
    shared_gate: bool = False  # a sigmoid of the token weighs it, else it counts in full
    biases: bool = False  # of the router and of all experts' products
    swiglu_limit: float | None = None  # None: SiLU(gate) * up; else gate and up are clamped, see `clamped_swiglu`
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        assert self.scores is Scores.SIGMOID or not (self.corrected or self.sums_best_two), "logits order the others"
        of_group = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or (self.sums_best_two and of_group < 2):
            raise ModelError(f"config.json: {self.num_experts} experts cannot be in {self.num_groups} groups (n_group)")
        if not self.top_k <= self.groups_kept * of_group <= self.num_experts:
            raise ModelError(
                f"config.json: {self.top_k} experts of each token cannot be chosen from {self.groups_kept} groups of "
                f"{of_group}, of {self.num_experts} experts (num_experts_per_tok, n_group, topk_group)"
            )

    @property
    def own(self) -> range:
        """Returns the experts whose weights are here: all of them."""
        return range(self.num_experts)

    @property
    def routing(self) -> RoutingNumbers:
        """Returns the numbers that choose, for kernels."""
        return RoutingNumbers(
            self.num_experts,
            self.top_k,
            self.scores,
            self.normalized,
            self.scaling,
            self.num_groups,
            self.groups_kept,
            self.sums_best_two,
        )

    @property
    def clamp(self) -> tuple[float, float] | None:
        """Returns limit and alpha of `clamped_swiglu`; None: experts compute SiLU(gate) * up."""
        return None if self.swiglu_limit is None else (self.swiglu_limit, self.swiglu_alpha)

    def shard(self, size: int, part: Callable[[int], range]) -> "Experts":
        """Returns the experts as one of `size` ranks has them: all of them, with a part of their columns. Raises
        ModelError.

        part: returns the rank's places of so many columns.
        """
        for number in (self.intermediate_size, self.shared_size):
            check_columns(number, size, "columns of an expert")
        own, shared = len(part(self.intermediate_size)), len(part(self.shared_size))
        return replace(self, intermediate_size=own, shared_size=shared)

    def divide(self, size: int, own: range, part: Callable[[int], range]) -> "RankExperts":
        """Returns the experts as one of `size` ranks has them that share out whole experts: its own ones, and a part of
        the columns of the one that every token takes. Raises ModelError.

        own: the rank's experts. part: see `shard`.
        """
        if self.num_experts < size:
            raise ModelError(f"{size} ranks cannot share {self.num_experts} experts")
        check_columns(self.shared_size, size, "columns of the shared expert")
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        return RankExperts(**numbers | {"shared_size": len(part(self.shared_size))}, of_rank=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts(Experts):
    """`Experts` as a rank has them that has some whole experts. It chooses among all of them."""

    of_rank: range

    @property
    def own(self) -> range:
        """Returns the experts whose weights are here."""
        return self.of_rank


def mixtral_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads Mixtral's settings (Jiang et al. 2024, arXiv 2401.04088)."""
    return Experts(
        num_experts=_num_experts(raw, "num_local_experts", "num_experts", 8),
        top_k=raw.integer("num_experts_per_tok", 2),
        intermediate_size=raw.integer("intermediate_size"),
        layers=tuple(range(num_layers)),
        normalized=True,
    )


def qwen2_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads the settings of Qwen2-MoE (Yang et al. 2024, arXiv 2407.10671)."""
    return Experts(
        num_experts=raw.integer("num_experts", 60),
        top_k=raw.integer("num_experts_per_tok", 4),
        intermediate_size=raw.integer("moe_intermediate_size", 1408),
        layers=_sparse_layers(raw, num_layers),
        normalized=raw.flag("norm_topk_prob"),
        shared_size=raw.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def qwen3_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads the settings of Qwen3-MoE (Yang et al. 2025, arXiv 2505.09388)."""
    return Experts(
        num_experts=_num_experts(raw, "num_experts", "num_local_experts", 128),
        top_k=raw.integer("num_experts_per_tok", 8),
        intermediate_size=raw.integer("moe_intermediate_size", 768),
        layers=_sparse_layers(raw, num_layers),
        normalized=raw.flag("norm_topk_prob"),
    )


def deepseek_v2_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads the settings of DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434)."""
    raw.require("scoring_func", "softmax")
    raw.require("norm_topk_prob", False)
    raw.require("moe_layer_freq", 1)
    method = raw.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise raw.refusal("topk_method", "is not supported (supported: greedy, group_limited_greedy)")
    raw.disregard("n_group", "topk_group")
    in_groups = method == "group_limited_greedy"
    first, size = raw.integer("first_k_dense_replace", 0, least=0), raw.integer("moe_intermediate_size", 1407)
    return Experts(
        num_experts=raw.integer("n_routed_experts", 64),
        top_k=raw.integer("num_experts_per_tok"),
        intermediate_size=size,
        layers=tuple(range(first, num_layers)),
        scaling=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.integer("n_group") if in_groups else 1,
        groups_kept=raw.integer("topk_group") if in_groups else 1,
        wide_logits=True,
        shared_size=size * raw.integer("n_shared_experts", 2),
    )


def deepseek_v3_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads the settings of DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437)."""
    raw.require("scoring_func", "sigmoid")
    raw.require("topk_method", "noaux_tc")
    raw.require("moe_layer_freq", 1)
    first, size = raw.integer("first_k_dense_replace", 3, least=0), raw.integer("moe_intermediate_size", 2048)
    return Experts(
        num_experts=raw.integer("n_routed_experts", 256),
        top_k=raw.integer("num_experts_per_tok", 8),
        intermediate_size=size,
        layers=tuple(range(first, num_layers)),
        scores=Scores.SIGMOID,
        normalized=raw.flag("norm_topk_prob", True),
        scaling=raw.number("routed_scaling_factor", 2.5),
        num_groups=raw.integer("n_group", 8),
        groups_kept=raw.integer("topk_group", 4),
        sums_best_two=True,
        corrected=True,
        wide_logits=True,
        shared_size=size * raw.integer("n_shared_experts", 1),
    )


def gpt_oss_experts(raw: ConfigSettings, num_layers: int) -> Experts:
    """Reads the settings of gpt-oss (OpenAI 2025, arXiv 2508.10925)."""
    top_k = raw.integer("num_experts_per_tok", 4)
    if raw.integer("experts_per_token", top_k) != top_k:
        raise raw.refusal("experts_per_token", "differs from num_experts_per_tok")
    return Experts(
        num_experts=_num_experts(raw, "num_local_experts", "num_experts", 128),
        top_k=top_k,
        intermediate_size=raw.integer("intermediate_size"),
        layers=tuple(range(num_layers)),
        scores=Scores.SOFTMAX_OF_CHOSEN,
        biases=True,
        swiglu_limit=raw.number("swiglu_limit", 7.0),
        swiglu_alpha=raw.number("swiglu_alpha", 1.702),
    )


def _num_experts(raw: ConfigSettings, name: str, other: str, default: int) -> int:
    """Returns the number of experts, which has two names. Raises ModelError if they differ."""
    number = raw.integer(name, raw.integer(other, default))
    if raw.integer(other, number) != number:
        raise raw.refusal(other, f"differs from {name}")
    return number


def _sparse_layers(raw: ConfigSettings, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with experts: each `decoder_sparse_step`-th, without those in `mlp_only_layers`."""
    step, dense = raw.integer("decoder_sparse_step", 1), raw.value("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise raw.refusal("mlp_only_layers", "is no list of layers")
    return tuple(layer for layer in range(step - 1, num_layers, step) if layer not in dense)
