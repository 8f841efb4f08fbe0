"""Mixture of experts as the MLP of a layer: a router, the experts, and one that every token takes in some families.

y = sum over the token's experts of weight * expert(x)  [+ sigmoid(x g) * shared(x), or + shared(x)]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.kernels.base import Operations
from services.engine.kernels.expert_tally import ExpertTally
from services.engine.models.base import Weights
from services.engine.models.config import DecoderConfig, layer_prefix
from services.engine.models.expert_tensors import ExpertNames
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import ExpertCodes, ExpertWeights, GroupedMlp
from services.engine.models.linear import Linear
from services.engine.models.parts import GatedMlp, Mlp, load_gated_mlp
from services.engine.models.routing import route
from services.engine.models.tensors import Tensors
from services.engine.models.weights import DecoderWeights


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The product whose logits choose each token's experts (Shazeer et al. 2017, arXiv 1701.06538)."""

    logits: Linear  # hidden -> experts, and behind them the shared expert's gate if it has one
    correction: Tensor | None  # float32[experts]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsMlp:
    """`Mlp` of experts."""

    numbers: Experts
    router: Router
    experts: GroupedMlp
    shared: GatedMlp | None
    width: int

    @property
    def is_kernels(self) -> bool:
        """Returns True if kernels compute all of it."""
        products = self.router.logits.is_kernel and (self.shared is None or self.shared.is_kernels)
        return products and self.experts.is_kernel

    @property
    def groups_rows(self) -> bool:
        """Returns True: an expert's weights are read once for all of its tokens."""
        return True

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        kernel, numbers, router = self.experts.kernel, self.numbers, self.router
        if numbers.wide_logits:
            logits = router.logits(x.to(torch.float32) if kernel is None else kernel.widened(x))
        else:
            logits = router.logits(x)
        of_experts, gate = logits[:, : numbers.num_experts], logits[:, numbers.num_experts :]
        shared = None if self.shared is None else self.shared.forward(x, operations)
        if kernel is not None:
            choice = kernel.choose(of_experts, router.correction)
            return self.experts.total(kernel(x, choice, shared, gate if numbers.shared_gate else None))
        y = self.experts(x, *route(of_experts, numbers, router.correction), operations.silu_mul)
        if shared is not None:
            y = y + (gate.sigmoid() * shared if numbers.shared_gate else shared)
        return self.experts.total(y)


def tally_experts(weights: Weights, num_tokens: Tensor | None = None) -> Tensor | None:
    """Makes all experts of a model count their pairs from now on. Returns where they do, int64[layers with experts,
    experts]; None: the model has no experts. num_tokens: see `ExpertTally`.
    """
    layers = weights.layers if isinstance(weights, DecoderWeights) else ()
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsMlp)]
    if not mlps:
        return None
    device = None if num_tokens is None else num_tokens.device
    counts = torch.zeros(len(mlps), mlps[0].numbers.num_experts, dtype=torch.int64, device=device)
    for of_layer, mlp in zip(counts, mlps, strict=True):
        mlp.experts.tally(ExpertTally(of_layer, num_tokens))
    return counts


def load_experts(names: ExpertNames, tensors: Tensors, config: DecoderConfig, layer: int) -> Mlp:
    """Reads the MLP of a layer, which has experts or is one of the dense layers between. Raises ModelError."""
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return load_gated_mlp(tensors, config, layer)
    prefix = layer_prefix(layer)
    shared = None
    if experts.shared_size:
        gate, up, down = (f"{prefix}{name}" for name in names.of_shared())
        # What it makes is added to what the others make before all of it is joined.
        gate_up, own_down = tensors.linear(gate, up, bias=False), tensors.linear(down, bias=False, joined=False)
        shared = GatedMlp(gate_up, own_down, experts.shared_size)
    readers = _OfAll(names, tensors, config, prefix) if names.in_one_tensor else _OfEach(names, tensors, prefix)
    return ExpertsMlp(
        numbers=experts,
        router=_load_router(names, tensors, experts, prefix),
        experts=tensors.grouped_mlp(experts, readers.numbers, readers.codes),
        shared=shared,
        width=max(experts.intermediate_size, experts.shared_size),
    )


def _load_router(names: ExpertNames, tensors: Tensors, experts: Experts, prefix: str) -> Router:
    parts = [names.router, *([names.shared_gate] if experts.shared_gate else [])]
    correction = tensors.vector(f"{prefix}{names.correction}").to(torch.float32) if experts.corrected else None
    logits = tensors.router(*(f"{prefix}{name}" for name in parts), bias=experts.biases, wide=experts.wide_logits)
    return Router(logits, correction)


def _own_turns(config: DecoderConfig) -> range:
    """Returns a rank's rows where the gates and ups of an expert take turns."""
    whole = config.whole
    assert isinstance(whole, DecoderConfig)
    assert whole.experts is not None
    columns = whole.experts.intermediate_size
    own = range(columns) if config.sharded is None else config.sharded.expert_columns(columns)
    return range(2 * own.start, 2 * own.stop)


class _OfEach:
    """Reads experts from tensors of their own."""

    def __init__(self, names: ExpertNames, tensors: Tensors, prefix: str) -> None:
        self._names = names
        self._tensors = tensors
        self._prefix = prefix

    def numbers(self, expert: int) -> ExpertWeights:
        """Reads an expert's weights."""
        gate, up, down = self._of(expert)
        return ExpertWeights(self._tensors.rows(gate, up), self._tensors.rows(down), None, None)

    def codes(self, expert: int) -> ExpertCodes:
        """Reads those of an expert's weights that are stored as codes."""
        found = [self._tensors.codes(name) for name in self._of(expert)]
        return ExpertCodes(tuple(matrix for each in found for matrix in each))

    def _of(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self._prefix}{name}.weight" for name in self._names.of_expert(expert))
        return gate, up, down


class _OfAll:
    """Reads experts, one at a time, from the tensors of all experts, in which gates and ups take turns."""

    def __init__(self, names: ExpertNames, tensors: Tensors, config: DecoderConfig, prefix: str) -> None:
        of_all = f"{prefix}{names.experts}."
        self._tensors = tensors
        self._gate_up, self._down = f"{of_all}gate_up_proj", f"{of_all}down_proj"
        self._turns = _own_turns(config)
        assert config.experts is not None
        self._first = config.experts.own.start
        self._gate_up_biases = tensors.vector(f"{self._gate_up}_bias")
        has_bias = tensors.has(f"{self._down}_bias")
        self._down_biases = tensors.vector(f"{self._down}_bias") if has_bias else None

    def numbers(self, expert: int) -> ExpertWeights:
        """Reads an expert's weights."""
        gate_up, down = (self._tensors.of_expert(name, expert) for name in (self._gate_up, self._down))
        return ExpertWeights(self._apart(gate_up.T), down.T.contiguous(), *self._biases(expert))

    def codes(self, expert: int) -> ExpertCodes:
        """Reads those of an expert's weights that are stored as codes."""
        gate_ups, downs = (self._tensors.codes(name, expert) for name in (self._gate_up, self._down))
        begin, end = self._turns.start, self._turns.stop
        apart = [matrix.rows(first, end, 2) for matrix in gate_ups for first in (begin, begin + 1)]
        return ExpertCodes((*apart, *downs), *self._biases(expert))

    def _biases(self, expert: int) -> tuple[Tensor, Tensor | None]:
        place = expert - self._first  # among those that are here
        down = None if self._down_biases is None else self._down_biases[place]
        return self._apart(self._gate_up_biases[place]), down

    def _apart(self, turns: Tensor) -> Tensor:
        """Returns this rank's gates, then its ups, [2 * width, ...]."""
        own = turns[self._turns.start : self._turns.stop]
        return torch.cat((own[::2], own[1::2]))
