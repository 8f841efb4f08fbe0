"""The experts of a layer on a GPU, with the weights of all of them one behind the other: in numbers, or as codes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.coded_experts import CodedStacks, grouped_coded_mlp
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.packed_codes import CodeStack
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.routing_numbers import RoutingNumbers
from services.engine.quantization.codes import CodedMatrix


class GroupedExperts(ABC):
    """The MLPs of all experts of a layer, their choice included. Subclasses have the weights."""

    def __init__(self, numbers: RoutingNumbers, swiglu: tuple[float, float] | None) -> None:
        """swiglu: see `grouped_mlp`."""
        self._numbers = numbers
        self._swiglu = swiglu
        self._tally: ExpertTally | None = None

    def tally(self, tally: ExpertTally) -> None:
        """Adds to the tally, from now on, the pairs of each expert. Steps that were recorded before do not."""
        self._tally = tally

    def widened(self, x: Tensor) -> Tensor:
        """Returns x, [T, hidden], in float32, for a router's product."""
        return x.to(torch.float32)

    def choose(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns each token's experts and weights, see `route`."""
        return route(logits, self._numbers, correction)

    def __call__(self, x: Tensor, choice: tuple[Tensor, Tensor], shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """Returns the weighted sum of what each token's experts make of it, [T, hidden].

        Adds what the shared expert makes of it, which the sigmoid of the gate, [T, 1], weighs if there is one.
        """
        y = self._multiply(x, choice)
        if shared is None:
            return y
        return y + (shared if gate is None else gate.sigmoid() * shared)

    @abstractmethod
    def _multiply(self, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the weighted sum of what each token's experts make of it, [T, hidden]."""


class StackedExperts(GroupedExperts):
    """Experts with weights in numbers. `put` brings those of each."""

    def __init__(
        self, numbers: RoutingNumbers, hidden: int, width: int, like: Tensor, swiglu: tuple[float, float] | None
    ) -> None:
        """width: columns between the two products. like: a tensor of the weights' dtype and device. swiglu: see
        `grouped_mlp`.
        """
        super().__init__(numbers, swiglu)
        self._stacks = ExpertStacks(
            like.new_empty(numbers.num_experts, 2 * width, hidden), like.new_empty(numbers.num_experts, hidden, width)
        )

    def put(
        self, expert: int, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> None:
        """Copies an expert's weights: gate_up [2 * width, hidden], gate first; down [hidden, width]; their biases."""
        stacks = self._stacks
        if gate_up_bias is not None and stacks.gate_up_bias is None:
            stacks = stacks._replace(gate_up_bias=gate_up.new_zeros(stacks.gate_up.shape[:2]))
        if down_bias is not None and stacks.down_bias is None:
            stacks = stacks._replace(down_bias=down.new_zeros(stacks.down.shape[:2]))
        self._stacks = stacks
        parts = zip(stacks, (gate_up, down, gate_up_bias, down_bias), strict=True)
        for stack, part in parts:
            if stack is not None and part is not None:
                stack[expert] = part

    def _multiply(self, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor:
        return grouped_mlp(x, *choice, self._stacks, self._swiglu, self._tally)


class CodedExperts(GroupedExperts):
    """Experts with weights as codes. `put_codes` brings those of each, in their order."""

    def __init__(self, numbers: RoutingNumbers, swiglu: tuple[float, float] | None) -> None:
        """swiglu: see `grouped_mlp`."""
        super().__init__(numbers, swiglu)
        self._gate_ups, self._downs = CodeStack(numbers.num_experts), CodeStack(numbers.num_experts)
        self._biases: list[tuple[Tensor | None, Tensor | None]] = []
        self._stacks: CodedStacks | None = None

    def put_codes(
        self,
        expert: int,
        gate_up: CodedMatrix,
        down: CodedMatrix,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> bool:
        """Packs an expert's weights: gate_up [2 * width, hidden], gate first; down [hidden, width]; their biases.

        Returns False if they are not stored as those of the first expert are.
        """
        if not self._gate_ups.put(expert, gate_up) or not self._downs.put(expert, down):
            return False
        self._biases.append((gate_up_bias, down_bias))
        if len(self._biases) == self._numbers.num_experts:
            self._stacks = CodedStacks(
                self._gate_ups.whole(), self._downs.whole(), *map(_stacked, zip(*self._biases, strict=True))
            )
        return True

    def _multiply(self, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor:
        assert self._stacks is not None, "not all experts are there"
        return grouped_coded_mlp(x, *choice, self._stacks, self._swiglu, self._tally)


def _stacked(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Returns a bias of each expert, [E, out]; None: none has one. A rank may have those of all experts, or of none."""
    there = [bias for bias in biases if bias is not None]
    assert len(there) in (0, len(biases))
    return torch.stack(there) if there else None
