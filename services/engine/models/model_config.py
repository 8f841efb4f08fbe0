"""The numbers that describe a model of any architecture, as config.json has them."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple, Self

from kvtransfer.layer_groups import divide_layers
from kvtransfer.layout import KvLayout
from services.engine.kernels.ranks import part_of
from services.engine.models.rope_config import Rope
from services.engine.models.settings import ConfigSettings
from services.engine.quantization.schemes import Scheme
from services.protocol.model_files.base import ModelError

DTYPES = ("float32", "bfloat16", "float16")
_UNITS = (128, 64, 32, 16, 8, 4, 2)  # of columns that a rank has; kernels multiply pairs of bfloat16


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one of `size` ranks has, as the whole model counts layers, heads and columns."""

    rank: int
    size: int
    whole: "ModelConfig"
    layers: range | None = None  # of a stage, whose ranks these are; None: all
    expert_parallel: bool = False  # it has some whole experts, and no part of the others

    @property
    def heads(self) -> range:
        """Returns the query heads: all of the rank's KV heads, or some of its one KV head that other ranks have too."""
        kv_heads, group = self.kv_heads, self.whole.num_heads // self.whole.num_kv_heads
        if self.size <= self.whole.num_kv_heads:
            return range(kv_heads.start * group, kv_heads.stop * group)
        first, stop = (-(-head * self.size // self.whole.num_kv_heads) for head in (kv_heads.start, kv_heads.stop))
        own = part_of(self.rank - first, stop - first, group)
        return range(kv_heads.start * group + own.start, kv_heads.start * group + own.stop)

    @property
    def kv_heads(self) -> range:
        """Returns the KV heads. Where there are fewer than ranks, each rank has one, and several have the same."""
        num_kv_heads = self.whole.num_kv_heads
        if self.size <= num_kv_heads:
            return part_of(self.rank, self.size, num_kv_heads)
        own = self.rank * num_kv_heads // self.size
        return range(own, own + 1)

    @property
    def intermediate(self) -> range:
        """Returns the columns between the two products of an MLP."""
        return self.part(self.whole.intermediate_size)

    @property
    def vocabulary(self) -> range:
        """Returns the tokens whose rows of the embedding, and of the output layer, the rank has."""
        return part_of(self.rank, self.size, self.whole.vocab_size)

    def experts(self, number: int) -> range:
        """Returns the rank's experts of so many: all of them if ranks share the columns of each."""
        return part_of(self.rank, self.size, number) if self.expert_parallel else range(number)

    def expert_columns(self, length: int) -> range:
        """Returns the rank's columns of each of its experts, of so many."""
        return range(length) if self.expert_parallel else self.part(length)

    def part(self, length: int) -> range:
        """Returns the rank's places of so many, an even number, of which all ranks have about the same number.

        They begin at a multiple of 128 where each rank has eight times as many or more, so that groups of weights in
        codes are not cut; else at one of a smaller power of two.
        """
        unit = next((unit for unit in _UNITS if length % unit == 0 and length >= 8 * unit * self.size), _UNITS[-1])
        assert length % unit == 0, length
        own = part_of(self.rank, self.size, length // unit)
        return range(own.start * unit, own.stop * unit)


class StageLayers(NamedTuple):
    """The layers of one stage of a model, as the whole model counts them."""

    layers: range
    num_layers: int  # of the whole model

    @property
    def is_first(self) -> bool:
        """Returns True if the first layer is here, and with it the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Returns True if the last layer is here, and with it the output layer."""
        return self.layers.stop == self.num_layers

    def own(self, some: Iterable[int]) -> tuple[int, ...]:
        """Returns those of some layers that are here, counted from the first one here."""
        return tuple(layer - self.layers.start for layer in some if layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The part of a model's shape that every architecture has. Subclasses add fields of their own.

    The configuration of one rank (`shard`) has its own numbers of heads and its own width of the MLP, and that of a
    stage its own layers, which it counts from 0; all else is the whole model's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of K and V in the pool
    max_position_embeddings: int
    rope: Rope | None  # None: positions are learned
    window: int | None  # positions that a token sees in any layer, its own included; None: all before it
    tie_word_embeddings: bool
    dtype: str | None  # of the checkpoint; None: config.json names none
    sharded: Shard | None = None  # None: this is a whole model
    windows: tuple[int | None, ...] = ()  # of each layer, where layers differ; empty: all have `window`
    num_mtp_layers: int = 0  # behind the last layer, for the prediction of further tokens; nobody reads their tensors
    attention_softcap: float | None = None  # of attention scores, see `Scoring`
    is_causal: bool = True  # False: every token sees all of its prompt; the model makes embeddings and no tokens
    scheme: Scheme | None = None  # by which weights are stored; None: as numbers, or as a GGUF file says
    num_labels: int = 0  # numbers that a head makes of a prompt's pooled states, a score; 0: there is no such head

    @property
    def output_size(self) -> int:
        """Returns the width of what `Model.forward` returns."""
        return self.hidden_size

    @property
    def generates(self) -> bool:
        """Returns False for a model that makes embeddings or scores alone."""
        return self.is_causal and not self.num_labels

    @property
    def num_planes(self) -> int:
        """Returns the planes of a layer's KV: K and V."""
        return 2

    @property
    def embedding_size(self) -> int:
        """Returns how many numbers come of a prompt for which no token is wanted."""
        return self.num_labels or self.output_size

    @property
    def has_token_types(self) -> bool:
        """Returns True if the model tells the tokens of two texts apart."""
        return False

    @property
    def attention_reaches(self) -> tuple[int | None, ...]:
        """Returns for each layer how far a token sees before and after it, where it sees both ways; None: all."""
        return (None,) * self.num_layers

    @property
    def scale(self) -> float:
        """Returns the factor on attention scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def longest_sequence(self) -> int:
        """Returns how many tokens a sequence may have where more are asked for than the model's positions."""
        limit = self.max_position_embeddings
        return limit if self.rope is None else self.rope.longest(limit)

    def for_lengths(self, longest: int) -> Self:
        """Returns the configuration of a model that serves sequences of so many tokens at most."""
        return self if self.rope is None else replace(self, rope=self.rope.for_lengths(longest))

    @property
    def layer_windows(self) -> int | tuple[int | None, ...] | None:
        """Returns the window of all layers, or of each layer where they differ."""
        return self.windows or self.window

    @property
    def hiding_windows(self) -> tuple[int | None, ...]:
        """Returns the window of each layer where they differ, None for one that hides nothing of any sequence."""
        longest = self.longest_sequence
        return tuple(None if window is None or window >= longest else window for window in self.windows)

    @property
    def whole(self) -> "ModelConfig":
        """Returns the configuration of the whole model."""
        return self if self.sharded is None else self.sharded.whole

    @property
    def has_experts(self) -> bool:
        """Returns True if layers have experts, of which each token takes some."""
        return False

    def shard(self, rank: int, size: int, layers: range | None = None, *, expert_parallel: bool = False) -> Self:
        """Returns the configuration of one of `size` ranks, which share the heads and the width of the MLP.

        Each KV head is on several ranks if there are fewer than ranks. Raises ModelError where a rank would have
        nothing, and for models that do not generate.

        layers: of its stage, of which there is one at least; None: all. expert_parallel: each rank has some whole
        experts; else each has a part of the columns of all of them.
        """
        assert self.sharded is None, "a rank's configuration is not sharded again"
        assert 0 <= rank < size, (rank, size)
        if expert_parallel and not self.has_experts:
            raise ModelError("--expert-parallel is for models with experts: this one has none")
        if size > 1 and not self.generates:
            raise ModelError(f"{size} ranks cannot share a model that makes embeddings or scores alone")
        if self.vocab_size < size:
            raise ModelError(f"{size} ranks cannot share a vocabulary of {self.vocab_size} tokens")
        if self.num_heads < size:
            raise ModelError(f"{size} ranks cannot share {self.num_heads} attention heads")
        check_columns(self.intermediate_size, size, "columns of the MLP")
        if size > self.num_kv_heads and self.num_heads // self.num_kv_heads < -(-size // self.num_kv_heads):
            raise ModelError(f"{size} ranks cannot share {self.num_heads} heads of {self.num_kv_heads} KV heads")
        shard = Shard(rank, size, self, layers, expert_parallel)
        here = shard.layers or range(self.num_layers)
        return replace(
            self,
            num_layers=len(here),
            windows=self.windows[here.start : here.stop],
            num_heads=len(shard.heads),
            num_kv_heads=len(shard.kv_heads),
            intermediate_size=len(shard.intermediate),
            sharded=shard,
        )

    @property
    def stage(self) -> StageLayers:
        """Returns the layers that are here."""
        layers = None if self.sharded is None else self.sharded.layers
        num_layers = self.whole.num_layers
        return StageLayers(range(num_layers) if layers is None else layers, num_layers)


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """Returns the layers of each stage, the stage with the last layers first. Earlier layers' stages may have one more.

    Raises ModelError for fewer layers than stages.
    """
    if num_stages > num_layers:
        raise ModelError(f"{num_stages} stages cannot share {num_layers} layers")
    parts = [part_of(stage, num_stages, num_layers) for stage in range(num_stages)]
    return [range(num_layers - part.stop, num_layers - part.start) for part in parts]


def described(config: ModelConfig) -> dict[str, object]:
    """Returns the numbers of the whole model by their names, for digests. Every rank's are the same.

    Numbers at their defaults are left out, so that a field that is new leaves the digests of other models as they
    were.
    """
    defaults = {field.name: field.default for field in fields(config.whole)}
    return {name: number for name, number in asdict(config.whole).items() if number != defaults[name]}


def check_columns(number: int, size: int, words: str) -> None:
    """Raises ModelError for columns that so many ranks cannot share. words: what they are."""
    if size > 1 and (number % _UNITS[-1] or 0 < number < _UNITS[-1] * size):
        raise ModelError(f"{size} ranks cannot share {number} {words}: each has an even number of them, at least two")


def layout_of(config: ModelConfig, block_size: int, dtype: str, *, token_scales: bool = False) -> KvLayout:
    """Returns the geometry of a model's KV blocks. Those of a model that keeps no KV are the least that a pool can
    have. token_scales: see `KvLayout`.
    """
    if not config.is_causal:
        return KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=dtype)
    groups = divide_layers(config.hiding_windows)
    return KvLayout(
        num_layers=config.num_layers if groups is None else groups.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        num_planes=config.num_planes,
        groups=groups,
        token_scales=token_scales,
    )


def read_dtype(raw: ConfigSettings) -> str | None:
    """Returns the checkpoint's dtype by config.json, under either name. Raises ModelError."""
    older = raw.text("torch_dtype")
    name = raw.text("dtype", older)
    if older is not None and name != older:
        raise ModelError(f"config.json: dtype is {name!r}, but torch_dtype is {older!r}")
    if name is not None and name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name
