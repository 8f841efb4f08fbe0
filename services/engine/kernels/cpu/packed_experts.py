"""The experts of a layer by kernels, with their weights packed in panels; and the kernel that chooses among them."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu import grouped_matmul, routing
from services.engine.kernels.cpu.grouped_matmul import Epilogue
from services.engine.kernels.cpu.matmul import MOST_ROWS, SCRATCH_BYTES, WEIGHTS, padded, put_panels
from services.engine.kernels.cpu.product_items import panels_of_item
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.routing import MOST_CHOSEN, MOST_EXPERTS, PLAN_HEAD, PLAN_WORDS
from services.engine.kernels.cpu.scratch import scratch
from services.engine.kernels.cpu.team import Kernel, Team, float_argument, the_team
from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.routing_numbers import RoutingNumbers, Scores

_LINE_WORDS = 16
_DTYPES = (torch.bfloat16, torch.float32)


class Choice(NamedTuple):
    """Each token's experts and their weights, one token after the other."""

    chosen: Tensor  # int32, at least tokens * top_k
    weights: Tensor  # float32, as many
    top_k: int


def can_pack(numbers: RoutingNumbers, hidden: int, dtype: torch.dtype) -> bool:
    """Returns True if there are kernels for experts of these numbers."""
    return (
        dtype in _DTYPES
        and (dtype == torch.float32 or hidden % 2 == 0)
        and numbers.num_experts <= MOST_EXPERTS
        and numbers.top_k <= MOST_CHOSEN
    )


class PackedExperts:
    """The MLPs of the experts of a layer, or of those that a rank has. `put` brings the weights of each.

    Experts are chosen among all of them; they have their places among those that are here where weights are concerned.
    """

    def __init__(
        self,
        numbers: RoutingNumbers,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        clamp: tuple[float, float] | None,
        own: range | None = None,
    ) -> None:
        """width: columns between the two products. clamp: limit and alpha of `Epilogue.CLAMPED`; None: SiLU. own: the
        experts that are here; None: all of them.
        """
        assert can_pack(numbers, hidden, dtype)
        own = range(numbers.num_experts) if own is None else own
        name = str(dtype).removeprefix("torch.")
        self._numbers = numbers
        self._num_experts, self._hidden, self._width = len(own), hidden, width  # experts that are here
        self._dtype, self._of_step = dtype, 2 if dtype == torch.bfloat16 else 1
        self._epilogue = Epilogue.SILU if clamp is None else Epilogue.CLAMPED
        self._limits = [float_argument(value) for value in clamp or (0.0, 0.0)]
        self._combine = _combine_kernel(name)
        self._make_room(name)
        self._gate_up_biases: Tensor | None = None  # float32[experts, 2, columns of whole panels]
        self._down_biases: Tensor | None = None  # float32[experts, 1, columns of whole panels]
        self._here = torch.full((numbers.num_experts,), -1, dtype=torch.int32)  # places of the experts
        self._here[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
        self._starts = torch.zeros(numbers.num_experts, dtype=torch.int32)
        # Pairs of each expert so far, wherever it is: see `ExpertTally`.
        self.counts = torch.zeros(numbers.num_experts, dtype=torch.int64)

    def put(
        self, expert: int, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> None:
        """Packs an expert's weights: gate_up [2 * width, hidden], gate first; down [hidden, width]; their biases.

        expert: its place among those that are here.
        """
        for part, matrix in enumerate(gate_up.split(self._width)):
            put_panels(self._gate_ups[expert, :, part], matrix)
        whole = down if self._depth == self._width else functional.pad(down, (0, self._depth - self._width))
        put_panels(self._downs[expert, :, 0], whole)
        self.put_biases(expert, gate_up_bias, down_bias)

    def put_biases(self, expert: int, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> None:
        """Takes an expert's biases, see `put`."""
        if gate_up_bias is not None:
            if self._gate_up_biases is None:
                self._gate_up_biases = torch.zeros(self._num_experts, 2, padded(self._width))
            self._gate_up_biases[expert, :, : self._width] = gate_up_bias.view(2, -1)
        if down_bias is not None:
            if self._down_biases is None:
                self._down_biases = torch.zeros(self._num_experts, 1, padded(self._hidden))
            self._down_biases[expert, 0, : self._hidden] = down_bias

    def tally(self, tally: ExpertTally) -> None:
        """Adds to the tally, from now on, the pairs of each expert. Steps that were recorded before do not."""
        assert tally.num_tokens is None, "on a CPU no token of a step is padding"
        self.counts = tally.counts

    def widened(self, x: Tensor) -> Tensor:
        """Returns x, [T, hidden], in float32, for a router's product."""
        if self._dtype == torch.float32:
            return x
        team = the_team()
        wide = team.empty(len(x), self._hidden, torch.float32)
        team.run(
            _widen_kernel(str(x.dtype).removeprefix("torch.")),
            len(x),
            x.data_ptr(),
            x.stride(0),
            wide.data_ptr(),
            wide.stride(0),
            self._hidden,
        )
        return wide

    def choose(self, logits: Tensor, correction: Tensor | None) -> Choice:
        """Chooses each token's experts. logits: [T, experts], rows may lie apart; correction: float32[experts]."""
        team, numbers, num_pairs = the_team(), self._numbers, len(logits) * self._numbers.top_k
        choice = Choice(_line(team, num_pairs, torch.int32), _line(team, num_pairs, torch.float32), numbers.top_k)
        team.run(
            _route_kernel(str(logits.dtype).removeprefix("torch."), numbers.scores),
            len(logits),
            logits.data_ptr(),
            logits.stride(0),
            choice.chosen.data_ptr(),
            choice.weights.data_ptr(),
            numbers.num_experts,
            numbers.top_k,
            numbers.num_groups,
            numbers.groups_kept,
            int(numbers.sums_best_two),
            0 if correction is None else correction.data_ptr(),
            int(numbers.normalized),
            float_argument(numbers.scaling),
        )
        return choice

    def __call__(self, x: Tensor, choice: Choice, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """Returns the weighted sum of what each token's experts that are here make of x, [T, hidden], rounded once.

        shared: [T, hidden], added; its rows have room for whole panels. gate: [T, 1], whose sigmoid weighs it.
        """
        team, tokens = the_team(), len(x)
        num_pairs = tokens * choice.top_k
        plan, pairs, places = self._sort(team, choice, num_pairs)
        made = self._feed(team, x, pairs, plan, num_pairs)
        target = team.empty(tokens, padded(self._hidden), x.dtype)
        team.run(
            self._combine,
            tokens,
            made.data_ptr(),
            made.stride(0),
            places.data_ptr(),
            choice.weights.data_ptr(),
            choice.top_k,
            target.data_ptr(),
            target.stride(0),
            padded(self._hidden),
            0 if shared is None else shared.data_ptr(),
            0 if shared is None else shared.stride(0),
            0 if gate is None else gate.data_ptr(),
            0 if gate is None else gate.stride(0),
        )
        return target[:, : self._hidden]

    def _make_room(self, dtype: str) -> None:
        """Makes memory for all experts' weights, and the kernels that multiply them."""
        self._gate_up, self._down = _product_kernel(dtype, self._epilogue), _product_kernel(dtype, Epilogue.PLAIN)
        self._depth = -(-self._width // self._of_step) * self._of_step  # of the second product
        self._gate_ups = self._memory(self._width, self._hidden, 2)
        self._downs = self._memory(self._hidden, self._depth, 1)

    def _feed(self, team: Team, x: Tensor, pairs: Tensor, plan: Tensor, num_pairs: int) -> Tensor:
        """Returns what its expert makes of each pair's row of x, [pairs, hidden]."""
        fed = self._multiply(team, self._gate_up, self._gate_ups, self._gate_up_biases, (x, pairs, plan), num_pairs)
        return self._multiply(team, self._down, self._downs, self._down_biases, (fed, None, plan), num_pairs)

    def _sort(self, team: Team, choice: Choice, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
        plan = _line(team, PLAN_HEAD + PLAN_WORDS * self.most_blocks(num_pairs), torch.int32)
        pairs, places = _line(team, num_pairs, torch.int32), _line(team, num_pairs, torch.int32)
        team.run(
            _sort_kernel(),
            1,
            choice.chosen.data_ptr(),
            num_pairs,
            choice.top_k,
            self._numbers.num_experts,
            MOST_ROWS,
            plan.data_ptr(),
            pairs.data_ptr(),
            places.data_ptr(),
            self._starts.data_ptr(),
            self.counts.data_ptr(),
            self._here.data_ptr(),
            at_a_time=1,
        )
        return plan, pairs, places

    def _multiply(
        self,
        team: Team,
        kernel: Kernel,
        weight: Tensor,
        bias: Tensor | None,
        rows: tuple[Tensor, Tensor | None, Tensor],
        num_pairs: int,
    ) -> Tensor:
        """Multiplies a row for each pair. rows: x, the row of x of each pair or None for all, plan."""
        x, pairs, plan = rows
        panels, blocks = weight.shape[1], self.most_blocks(num_pairs)
        target = team.empty(num_pairs, panels * COLUMNS, x.dtype)
        panels_at_once = panels_of_item(team, panels, blocks)
        team.run(
            kernel,
            blocks * -(-panels // panels_at_once),
            x.data_ptr(),
            x.stride(0),
            0 if pairs is None else pairs.data_ptr(),
            plan.data_ptr(),
            target.data_ptr(),
            target.stride(0),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            weight.shape[3] * self._of_step,
            panels,
            scratch(SCRATCH_BYTES),
            panels_at_once,
            (team.num_threads - 1) * panels_at_once,
            *self._limits,
            at_a_time=1,
        )
        return target

    def most_blocks(self, num_pairs: int) -> int:
        """Returns how many blocks of rows there are at most, whatever is chosen."""
        return min(self._num_experts, num_pairs) + num_pairs // MOST_ROWS

    def _memory(self, columns: int, depth: int, parts: int) -> Tensor:
        panels = padded(columns) // COLUMNS
        shape = (self._num_experts, panels, parts, depth // self._of_step, COLUMNS, self._of_step)
        return WEIGHTS.empty(torch.Size(shape), self._dtype)


def _line(team: Team, count: int, dtype: torch.dtype) -> Tensor:
    """Returns memory for so many numbers that lie one after the other."""
    return team.empty(-(-count // _LINE_WORDS), _LINE_WORDS, dtype).view(-1)


@cache
def _product_kernel(dtype: str, epilogue: Epilogue) -> Kernel:
    return grouped_matmul.make_grouped_matmul(dtype, epilogue)


@cache
def _route_kernel(dtype: str, scores: Scores) -> Kernel:
    return routing.make_route(dtype, scores)


@cache
def _sort_kernel() -> Kernel:
    return routing.make_sort()


@cache
def _combine_kernel(dtype: str) -> Kernel:
    return routing.make_combine(dtype)


@cache
def _widen_kernel(dtype: str) -> Kernel:
    return routing.make_widen(dtype)
