"""The experts of a layer on a GPU, with the weights of all of them one behind the other."""

import torch
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.routing_numbers import RoutingNumbers


class StackedExperts:
    """The MLPs of all experts of a layer. `put` brings the weights of each."""

    def __init__(
        self, numbers: RoutingNumbers, hidden: int, width: int, like: Tensor, swiglu: tuple[float, float] | None
    ) -> None:
        """width: columns between the two products. like: a tensor of the weights' dtype and device. swiglu: see
        `grouped_mlp`.
        """
        self._numbers = numbers
        self._swiglu = swiglu
        self._tally: ExpertTally | None = None
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
        y = grouped_mlp(x, *choice, self._stacks, self._swiglu, self._tally)
        if shared is None:
            return y
        return y + (shared if gate is None else gate.sigmoid() * shared)
