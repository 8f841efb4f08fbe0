"""The experts of a layer by kernels, with their weights in codes."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from services.engine.kernels.cpu import coded_grouped, coded_products
from services.engine.kernels.cpu.coded_linear import FEW_ROWS
from services.engine.kernels.cpu.coded_panels import CodedPanels, can_pack, empty_panels, pack_codes, step_depth
from services.engine.kernels.cpu.coded_products import coded_arithmetic
from services.engine.kernels.cpu.grouped_matmul import Epilogue
from services.engine.kernels.cpu.packed_experts import PackedExperts
from services.engine.kernels.cpu.product_items import panels_of_item
from services.engine.kernels.cpu.register_tiles import COLUMNS, Arithmetic
from services.engine.kernels.cpu.routing import PLAN_PAIRS_AT
from services.engine.kernels.cpu.scale_forms import ScaleForm, scale_form
from services.engine.kernels.cpu.scratch import own_rows, scratch
from services.engine.kernels.cpu.team import Kernel, Team
from services.engine.kernels.routing_numbers import RoutingNumbers
from services.engine.quantization.codes import Code, CodedMatrix


class CodedExperts(PackedExperts):
    """The MLPs of all experts of a layer. `put_codes` brings the weights of each, `put_biases` their biases."""

    def __init__(
        self,
        numbers: RoutingNumbers,
        first: Sequence[CodedMatrix],
        dtype: torch.dtype,
        clamp: tuple[float, float] | None,
        own: range | None = None,
    ) -> None:
        """first: gate, up [width, hidden] and down [hidden, width] of an expert, which `can_multiply` accepts. They are
        looked at, and not kept.
        """
        self._first = first
        width, hidden = first[0].shape
        super().__init__(numbers, hidden, width, dtype, clamp, own)
        del self._first

    def put_codes(self, expert: int, weights: Sequence[CodedMatrix]) -> None:
        """Packs an expert's gate, up and down, which are stored like the first expert's."""
        gate, up, down = weights
        for part, matrix in enumerate((gate, up)):
            self._fed = pack_codes(matrix, self._gate_up_panels[expert, part])
        self._made = pack_codes(down, self._down_panels[expert, 0])

    def _make_room(self, dtype: str) -> None:
        gate, _, down = self._first
        self._name = dtype
        self._widens = dtype == "bfloat16" and coded_arithmetic(dtype) is Arithmetic.SINGLES
        self._gate_up_panels = empty_panels(gate, self._num_experts, 2)
        self._down_panels = empty_panels(down, self._num_experts, 1)
        self._prepare = _prepare_kernel(dtype, widens=self._widens)
        self._gate_up_kernel = self._kernel(gate, self._epilogue)
        self._down_kernel = self._kernel(down, Epilogue.PLAIN)

    def _kernel(self, matrix: CodedMatrix, epilogue: Epilogue) -> Kernel:
        scales = scale_form(matrix)
        assert scales is not None
        return _product_kernel(self._name, matrix.code, scales, epilogue, has_offsets=matrix.offsets is not None)

    def _feed(self, team: Team, x: Tensor, pairs: Tensor, plan: Tensor, num_pairs: int) -> Tensor:
        own = self._gate_up_panels, self._fed, self._gate_up_kernel, self._gate_up_biases
        fed = self._multiply_codes(team, x, pairs, plan, num_pairs, *own)
        own = self._down_panels, self._made, self._down_kernel, self._down_biases
        return self._multiply_codes(team, fed, None, plan, num_pairs, *own)

    def _multiply_codes(
        self,
        team: Team,
        x: Tensor,
        pairs: Tensor | None,
        plan: Tensor,
        num_pairs: int,
        weight: Tensor,
        kind: CodedPanels,
        kernel: Kernel,
        bias: Tensor | None,
    ) -> Tensor:
        """Multiplies a row for each pair. pairs: the row of x of each; None: x has one for each. kind: of the panels,
        whose weights those of one expert are.
        """
        panels, blocks = weight.shape[2], self.most_blocks(num_pairs)
        rows, sums = self._prepared(team, x, pairs, plan, num_pairs, kind)
        target = team.empty(num_pairs, panels * COLUMNS, x.dtype)
        at_once = panels_of_item(team, panels, blocks)
        team.run(
            kernel,
            blocks * -(-panels // at_once),
            rows.data_ptr(),
            rows.stride(0) * rows.itemsize,
            0 if sums is None else sums.data_ptr(),
            0 if sums is None else sums.stride(0) * sums.itemsize,
            plan.data_ptr(),
            target.data_ptr(),
            target.stride(0),
            weight.data_ptr(),
            kind.panel_bytes,
            kind.scale_bytes,
            0 if bias is None else bias.data_ptr(),
            panels,
            kind.num_groups,
            kind.group_steps,
            kind.num_steps - (kind.num_groups - 1) * kind.group_steps,
            kind.table.data_ptr(),
            scratch(coded_products.SCRATCH_BYTES),
            at_once,
            FEW_ROWS,
            *self._limits,
            at_a_time=1,
        )
        return target

    def _prepared(
        self, team: Team, x: Tensor, pairs: Tensor | None, plan: Tensor, num_pairs: int, kind: CodedPanels
    ) -> tuple[Tensor, Tensor | None]:
        """Returns a row for each pair, and its sums over groups if they are needed."""
        needs_copies = self._widens or pairs is not None or kind.padded_depth != kind.depth
        if not needs_copies and not kind.has_offsets:
            return x, None
        rows = own_rows(team, num_pairs, kind.padded_depth * (4 if self._widens else x.itemsize))
        sums = own_rows(team, num_pairs, kind.num_groups * 4) if kind.has_offsets else None
        team.run(
            self._prepare,
            num_pairs,
            x.data_ptr(),
            x.stride(0),
            0 if pairs is None else pairs.data_ptr(),
            plan.data_ptr() + PLAN_PAIRS_AT,
            kind.depth,
            kind.padded_depth,
            rows.data_ptr(),
            rows.stride(0) * rows.itemsize,
            kind.group_steps * step_depth(kind.code),
            0 if sums is None else sums.data_ptr(),
            0 if sums is None else sums.stride(0) * sums.itemsize,
        )
        return rows, sums


def can_multiply(weights: Sequence[CodedMatrix]) -> bool:
    """Returns True if there are kernels for gate, up and down that are stored so."""
    gate, up, _ = weights
    return gate.is_like(up) and all(can_pack(matrix) and matrix.order is None for matrix in weights)


@cache
def _product_kernel(dtype: str, code: Code, scales: ScaleForm, epilogue: Epilogue, *, has_offsets: bool) -> Kernel:
    return coded_grouped.make_grouped_coded(dtype, code, scales, epilogue, has_offsets=has_offsets)


@cache
def _prepare_kernel(dtype: str, *, widens: bool) -> Kernel:
    return coded_grouped.make_prepare_pairs(dtype, widens=widens)
