"""The experts of a layer by kernels, in int8: codes of weights are multiplied by codes of rows."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from services.engine.kernels.cpu import int8_grouped
from services.engine.kernels.cpu.grouped_matmul import Epilogue
from services.engine.kernels.cpu.int8_linear import has_kernel
from services.engine.kernels.cpu.int8_matmul import DEPTH_OF_STEP, SUMS_BYTES, pack_numbers, put_panels
from services.engine.kernels.cpu.int8_rows import int8_rows
from services.engine.kernels.cpu.matmul import WEIGHTS, padded
from services.engine.kernels.cpu.packed_experts import PackedExperts
from services.engine.kernels.cpu.product_items import panels_of_item
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.routing import PLAN_PAIRS_AT
from services.engine.kernels.cpu.scratch import scratch
from services.engine.kernels.cpu.team import Kernel, Team
from services.engine.kernels.routing_numbers import RoutingNumbers
from services.engine.quantization.codes import CodedMatrix

_BIASES = 2  # their place in the numbers of a panel


class Int8Experts(PackedExperts):
    """The MLPs of all experts of a layer. `put_codes` brings the weights of each, then `put_biases` their biases."""

    def __init__(
        self,
        numbers: RoutingNumbers,
        first: Sequence[CodedMatrix],
        dtype: torch.dtype,
        clamp: tuple[float, float] | None,
        own: range | None = None,
    ) -> None:
        """first: gate, up [width, hidden] and down [hidden, width] of an expert, which `can_multiply` accepts."""
        width, hidden = first[0].shape
        super().__init__(numbers, hidden, width, dtype, clamp, own)

    def put_codes(self, expert: int, weights: Sequence[CodedMatrix]) -> None:
        """Packs an expert's gate, up and down, which are stored like the first expert's."""
        gate, up, down = weights
        for part, matrix in enumerate((gate, up)):
            _put(matrix, self._gate_up_panels[expert, part], self._gate_up_numbers[expert, part])
        _put(down, self._down_panels[expert, 0], self._down_numbers[expert, 0])

    def put_biases(self, expert: int, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> None:
        """Takes an expert's biases, see `PackedExperts.put`."""
        for numbers, bias in ((self._gate_up_numbers, gate_up_bias), (self._down_numbers, down_bias)):
            if bias is not None:
                for part, own in enumerate(bias.view(numbers.shape[1], -1)):
                    of_panels = torch.zeros(padded(len(own)))
                    of_panels[: len(own)] = own
                    numbers[expert, part, :, _BIASES] = of_panels.view(-1, COLUMNS)

    def _make_room(self, dtype: str) -> None:
        self._gate_up_panels, self._gate_up_numbers = self._room(self._width, self._hidden, 2)
        self._down_panels, self._down_numbers = self._room(self._hidden, self._width, 1)
        self._rows = int8_rows(dtype)
        self._gate_up, self._down = _product_kernel(dtype, self._epilogue), _product_kernel(dtype, Epilogue.PLAIN)

    def _room(self, columns: int, depth: int, parts: int) -> tuple[Tensor, Tensor]:
        """Returns memory for the panels of all experts, and for the numbers of these."""
        shape = (self._num_experts, parts, padded(columns) // COLUMNS)
        panels = (*shape, -(-depth // DEPTH_OF_STEP), COLUMNS, DEPTH_OF_STEP)
        return WEIGHTS.empty(torch.Size(panels), torch.int8), torch.zeros(*shape, 3, COLUMNS)

    def _feed(self, team: Team, x: Tensor, pairs: Tensor, plan: Tensor, num_pairs: int) -> Tensor:
        own = self._gate_up, self._gate_up_panels, self._gate_up_numbers
        fed = self._multiply_codes(team, x[:, : self._hidden], pairs, plan, num_pairs, *own)
        own = self._down, self._down_panels, self._down_numbers
        return self._multiply_codes(team, fed[:, : self._width], None, plan, num_pairs, *own)

    def _multiply_codes(
        self,
        team: Team,
        x: Tensor,
        pairs: Tensor | None,
        plan: Tensor,
        num_pairs: int,
        kernel: Kernel,
        weight: Tensor,
        numbers: Tensor,
    ) -> Tensor:
        """Multiplies a row for each pair. pairs: the row of x of each; None: x has one for each."""
        panels, steps, blocks = weight.shape[2], weight.shape[3], self.most_blocks(num_pairs)
        of_pairs, there = 0 if pairs is None else pairs.data_ptr(), plan.data_ptr() + PLAN_PAIRS_AT
        codes, of_codes = self._rows.read(team, x, num_pairs, steps, of_pairs, there)
        target = team.empty(num_pairs, panels * COLUMNS, x.dtype)
        at_once = panels_of_item(team, panels, blocks)
        team.run(
            kernel,
            blocks * -(-panels // at_once),
            *of_codes,
            plan.data_ptr(),
            target.data_ptr(),
            target.stride(0),
            weight.data_ptr(),
            numbers.data_ptr(),
            steps,
            panels,
            scratch(SUMS_BYTES),
            at_once,
            *self._limits,
            at_a_time=1,
        )
        del codes  # not sooner: the kernel reads them
        return target


def can_multiply(weights: Sequence[CodedMatrix]) -> bool:
    """Returns True if there are kernels for gate, up and down that are stored so."""
    gate, up, _ = weights
    return gate.is_like(up) and all(has_kernel(matrix) and matrix.order is None for matrix in weights)


def _put(matrix: CodedMatrix, panels: Tensor, numbers: Tensor) -> None:
    codes = matrix.codes.view(torch.int8)
    put_panels(panels, codes)
    numbers.copy_(pack_numbers(codes, matrix.scales[:, 0].to(torch.float32), None))


@cache
def _product_kernel(dtype: str, epilogue: Epilogue) -> Kernel:
    return int8_grouped.make_grouped_int8(dtype, epilogue)
