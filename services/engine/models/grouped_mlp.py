"""The MLPs of a layer's experts, of which each token takes some.

Pairs of a token and an expert are sorted by expert, so that each expert's weights are read once, for all of its tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.models.experts_config import Experts
from services.engine.models.linear import Join, Linear, MakeProduct
from services.engine.quantization.codes import CodedMatrix


class ExpertWeights(NamedTuple):
    """The weights of one expert."""

    gate_up: Tensor  # [2 * width, hidden], gate first
    down: Tensor  # [hidden, width]
    gate_up_bias: Tensor | None  # [2 * width]
    down_bias: Tensor | None  # [hidden]


class ExpertsKernel(Protocol):
    """Kernels that compute the experts of a layer, their choice included."""

    def tally(self, tally: ExpertTally) -> None:
        """Adds to the tally, from now on, the pairs of each expert."""

    def widened(self, x: Tensor) -> Tensor:
        """Returns x, [T, hidden], in float32, for a router's product."""

    def choose(self, logits: Tensor, correction: Tensor | None) -> Any:
        """Chooses each token's experts, as `routing.route` does, for the call of this kernel."""

    def __call__(self, x: Tensor, choice: Any, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """Returns what a token's experts make of it, weighted and summed, and adds what the shared expert makes of it,
        weighted by the sigmoid of the gate if there is one: [T, hidden].
        """


class FillableExperts(ExpertsKernel, Protocol):
    """`ExpertsKernel` that gets the weights of one expert after the other, in numbers."""

    def put(
        self, expert: int, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> None:
        """Takes an expert's weights, see `ExpertWeights`. expert: its place among those that are here."""


class ExpertCodes(NamedTuple):
    """The weights of one expert as codes."""

    # Gate and up [width, hidden], and down [hidden, width]. Fewer: the others are stored in numbers.
    matrices: tuple[CodedMatrix, ...]
    gate_up_bias: Tensor | None = None  # [2 * width], gate first
    down_bias: Tensor | None = None  # [hidden]

    @property
    def is_whole(self) -> bool:
        """Returns True if all of the expert's matrices are codes."""
        return len(self.matrices) == len(("gate", "up", "down"))


# Makes room for a layer's experts; None: there are no kernels for them. Parameters: the numbers, and one expert's
# second weight, [hidden, width].
MakeExperts = Callable[[Experts, Tensor], FillableExperts | None]
# Makes what computes a layer's experts whose weights are codes, see `coded_experts`.
MakeCodedExperts = Callable[[Experts, Callable[[int], ExpertCodes | None], torch.dtype], ExpertsKernel | None]


class GroupedMlp:
    """The MLPs of all experts of a layer, for inference."""

    __slots__ = ("_downs", "_experts", "_gate_ups", "_join", "_tally", "kernel")

    def __init__(
        self,
        experts: Experts,
        read: Callable[[int], ExpertWeights],
        *,
        make_kernel: MakeExperts | None = None,
        make_product: MakeProduct | None = None,
        kernel: ExpertsKernel | None = None,
        join: Join | None = None,
    ) -> None:
        """read: returns the weights of an expert, which are taken over; they are read one expert after the other.

        make_kernel: makes what computes all of it. make_product: where that makes nothing, see `Linear`. kernel: what
        computes all of it, and has the weights already. join: of the ranks that share the experts.
        """
        self._experts = experts
        self._join = join
        self._gate_ups: list[Linear] = []
        self._downs: list[Linear] = []
        self.kernel = kernel  # what computes all of it
        self._tally: ExpertTally | None = None
        if kernel is not None:
            return
        filled: FillableExperts | None = None
        for place, expert in enumerate(experts.own):
            weights = read(expert)
            if place == 0 and make_kernel is not None:
                self.kernel = filled = make_kernel(experts, weights.down)
            if filled is not None:
                filled.put(place, *weights)
            else:
                self._gate_ups.append(Linear(weights.gate_up, weights.gate_up_bias, make_product=make_product))
                self._downs.append(Linear(weights.down, weights.down_bias, make_product=make_product))

    @property
    def is_kernel(self) -> bool:
        """Returns True if kernels compute all of it, and `total`."""
        return self.kernel is not None and (self._join is None or self._join.is_kernel)

    def total(self, y: Tensor) -> Tensor:
        """Returns the sum over all who have experts, or columns of them, [T, hidden], of one rank's y."""
        return y if self._join is None else self._join(y)

    def tally(self, tally: ExpertTally) -> None:
        """Adds to the tally, from now on, the pairs of each expert."""
        if self.kernel is not None:
            self.kernel.tally(tally)
        else:
            assert tally.num_tokens is None, "without a kernel no token of a step is padding"
            self._tally = tally

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the weighted sum of what those of each token's experts make of it that are here, [T, hidden].

        x: [T, hidden]; chosen: int64[T, top_k], different experts; weights: float32[T, top_k]. silu_mul: see
        `Operations`. The sums are float32, and their order is that of the choice. Where there is a kernel, call that.
        """
        assert self.kernel is None
        expert_of_pair, own = chosen.flatten(), self._experts.own
        order = expert_of_pair.argsort(stable=True)
        counts = expert_of_pair.bincount(minlength=self._experts.num_experts)
        if self._tally is not None:
            self._tally.counts.add_(counts)
        first = int(counts[: own.start].sum())
        counts = counts[own.start : own.stop]
        order = order[first : first + int(counts.sum())]
        rows = x[order // chosen.shape[1]].split(counts.tolist())
        by_pair = x.new_zeros(len(expert_of_pair), x.shape[1])  # pairs of experts that are not here stay 0
        if len(order):
            by_pair[order] = torch.cat(
                [self._feed(place, some, silu_mul) for place, some in enumerate(rows) if len(some)]
            )
        by_token = by_pair.unflatten(0, chosen.shape).to(torch.float32)
        return (by_token * weights[:, :, None]).sum(dim=1).to(x.dtype)

    def _feed(self, expert: int, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what an expert makes of some tokens, [N, hidden]. expert: its place among those that are here."""
        gate_up, down = self._gate_ups[expert], self._downs[expert]
        clamp = self._experts.clamp
        return down(gate_up.gated(x, silu_mul) if clamp is None else clamped_swiglu(gate_up(x), *clamp))


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Returns gate * sigmoid(alpha * gate) * (up + 1) of clamped numbers, [T, 2 * width] -> [T, width].

    gate is at most the limit, up between it and its negative (OpenAI 2025, arXiv 2508.10925).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def packed_experts(experts: Experts, down: Tensor) -> FillableExperts | None:
    """Makes room for experts in a CPU's kernels: see `MakeExperts`."""
    from services.engine.kernels.cpu.packed_experts import PackedExperts, can_pack

    hidden, width = down.shape
    if not can_pack(experts.routing, hidden, down.dtype):
        return None
    return PackedExperts(experts.routing, hidden, width, down.dtype, experts.clamp, experts.own)


def coded_experts(
    experts: Experts, read: Callable[[int], ExpertCodes | None], dtype: torch.dtype
) -> ExpertsKernel | None:
    """Makes a CPU's kernels for experts whose weights are codes, for x of this dtype; None: there are none for them,
    or they are not stored in codes, or not all in the same way.

    read: returns the codes of an expert, which are whole and are taken over; None: it is stored in numbers.
    """
    from services.engine.kernels.cpu import coded_experts, int8_experts
    from services.engine.kernels.cpu.packed_experts import can_pack

    first = read(experts.own[0])
    if first is None or not can_pack(experts.routing, first.matrices[0].shape[1], dtype):
        return None
    can_multiply = int8_experts.can_multiply
    kernel: int8_experts.Int8Experts | coded_experts.CodedExperts
    if can_multiply(first.matrices):
        kernel = int8_experts.Int8Experts(experts.routing, first.matrices, dtype, experts.clamp, experts.own)
    else:
        can_multiply = coded_experts.can_multiply
        if not can_multiply(first.matrices):
            return None
        kernel = coded_experts.CodedExperts(experts.routing, first.matrices, dtype, experts.clamp, experts.own)

    def put(place: int, codes: ExpertCodes | None) -> bool:
        """Packs an expert, whose codes nobody holds then but the first one's. place: among those that are here."""
        if codes is None or not can_multiply(codes.matrices):
            return False
        pairs = zip(codes.matrices, first.matrices, strict=True)
        if not all(own.is_like(other) and own.shape == other.shape for own, other in pairs):
            return False
        kernel.put_codes(place, codes.matrices)
        kernel.put_biases(place, codes.gate_up_bias, codes.down_bias)
        return True

    others = enumerate(experts.own[1:], 1)
    return kernel if put(0, first) and all(put(place, read(expert)) for place, expert in others) else None
