"""The MLPs of a layer's experts, of which each token takes some.

Pairs of a token and an expert are sorted by expert, so that each expert's weights are read once, for all of its tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.models.linear import Linear, MakeProduct


class ExpertWeights(NamedTuple):
    """The weights of one expert."""

    gate_up: Tensor  # [2 * width, hidden], gate first
    down: Tensor  # [hidden, width]
    gate_up_bias: Tensor | None  # [2 * width]
    down_bias: Tensor | None  # [hidden]


class Swiglu(NamedTuple):
    """The numbers of `clamped_swiglu`."""

    limit: float
    alpha: float


class GroupedMlp:
    """The MLPs of all experts of a layer, for inference."""

    __slots__ = ("_downs", "_gate_ups", "_swiglu")

    def __init__(
        self,
        num_experts: int,
        read: Callable[[int], ExpertWeights],
        swiglu: Swiglu | None,
        *,
        fused: bool = False,
        make_product: MakeProduct | None = None,
    ) -> None:
        """read: returns the weights of an expert, which are taken over; they are read one expert after the other.

        swiglu: None for SiLU(gate) * up. fused, make_product: see `Linear`.
        """
        self._swiglu = swiglu
        self._gate_ups: list[Linear] = []
        self._downs: list[Linear] = []
        for expert in range(num_experts):
            weights = read(expert)
            self._gate_ups.append(Linear(weights.gate_up, weights.gate_up_bias, make_product=make_product))
            self._downs.append(Linear(weights.down, weights.down_bias, make_product=make_product))

    @property
    def is_kernel(self) -> bool:
        """Returns True if our kernels multiply, on the CPU."""
        return False

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the weighted sum of what each token's experts make of it, [T, hidden].

        x: [T, hidden]; chosen: int64[T, top_k], different experts; weights: float32[T, top_k]. silu_mul: see
        `Operations`. The sums are float32, and their order is that of the choice.
        """
        expert_of_pair = chosen.flatten()
        order = expert_of_pair.argsort(stable=True)
        counts = expert_of_pair.bincount(minlength=len(self._downs)).tolist()
        rows = x[order // chosen.shape[1]].split(counts)
        fed = torch.cat([self._feed(expert, some, silu_mul) for expert, some in enumerate(rows) if len(some)])
        by_pair = torch.empty_like(fed)
        by_pair[order] = fed
        by_token = by_pair.unflatten(0, chosen.shape).to(torch.float32)
        return (by_token * weights[:, :, None]).sum(dim=1).to(x.dtype)

    def _feed(self, expert: int, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what an expert makes of some tokens, [N, hidden]."""
        gate_up, down = self._gate_ups[expert], self._downs[expert]
        if self._swiglu is None:
            return down(gate_up.gated(x, silu_mul))
        return down(clamped_swiglu(gate_up(x), self._swiglu))


def clamped_swiglu(gate_up: Tensor, swiglu: Swiglu) -> Tensor:
    """Returns gate * sigmoid(alpha * gate) * (up + 1) of clamped numbers, [T, 2 * width] -> [T, width].

    gate is at most the limit, up between it and its negative (OpenAI 2025, arXiv 2508.10925).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=swiglu.limit)
    up = up.clamp(-swiglu.limit, swiglu.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * swiglu.alpha))
