"""Linear layers by kernels, with a weight that stays in codes."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from services.engine.kernels.cpu import coded_inputs, coded_matmul, coded_products
from services.engine.kernels.cpu.amx.matmul import block_configs
from services.engine.kernels.cpu.coded_matmul import OWN_ROWS, fits_amx
from services.engine.kernels.cpu.coded_panels import CodedPanels, can_pack, pack_codes, step_depth
from services.engine.kernels.cpu.coded_products import coded_arithmetic
from services.engine.kernels.cpu.coded_tiles import CODED_ROWS
from services.engine.kernels.cpu.matmul import MOST_ROWS, padded
from services.engine.kernels.cpu.packed_linear import padded_bias
from services.engine.kernels.cpu.product_items import items_of, panels_of_item
from services.engine.kernels.cpu.register_tiles import COLUMNS, Arithmetic
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.kernels.cpu.scratch import own_rows, scratch
from services.engine.kernels.cpu.team import Kernel, the_team
from services.engine.quantization.codes import Code, CodedMatrix

_LEAST_ITEMS_OF_FEW = 4  # of a thread: in a product of few rows an item also prepares the rows
_DTYPES = (torch.bfloat16, torch.float32)
# Above so many rows panels are unpacked. Beside AMX this is an estimate by the rates of instructions, not measured:
# there, pairs of bfloat16 are multiplied at half the rate of float32 (see `isa.choose`), so that unpacking takes as
# long as 4 rows.
FEW_ROWS, _FEW_ROWS_BESIDE_AMX = 2 * CODED_ROWS, 4


class CodedLinear:
    """A linear layer, x W^T + b, of a weight in codes; it computes in the dtype of x, which is always the same."""

    __slots__ = ("_bias", "_columns", "_parts")

    def __init__(self, matrices: Sequence[CodedMatrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        """matrices: one below the other, accepted by `can_multiply`; taken over."""
        assert can_multiply(matrices, dtype)
        self._put([_Part(pack_codes(matrix), _name(dtype)) for matrix in matrices], bias)

    @classmethod
    def of_panels(cls, panels: CodedPanels, dtype: torch.dtype) -> "CodedLinear":
        """Makes a layer of a packed matrix, which it shares, without a bias."""
        own = cls.__new__(cls)
        own._put([_Part(panels, _name(dtype))], None)
        return own

    def _put(self, parts: Sequence["_Part"], bias: Tensor | None) -> None:
        self._parts = tuple(parts)
        self._columns = sum(part.panels.columns for part in parts)
        self._bias = None if bias is None else padded_bias(bias)

    def columns(self, begin: int, end: int) -> "CodedLinear | None":
        """Returns a layer for some columns of the result, which shares their panels; None: they are no whole panels."""
        parts, first = list[_Part](), 0
        for part in self._parts:
            low, high = max(begin - first, 0), min(end - first, part.panels.columns)
            if low < high:
                if low % COLUMNS or (high % COLUMNS and high != part.panels.columns):
                    return None
                parts.append(part.of_panels(low // COLUMNS, -(-high // COLUMNS)))
            first += part.panels.columns
        own = CodedLinear.__new__(CodedLinear)
        own._put(parts, None if self._bias is None else self._bias[begin:end])
        return own

    @property
    def can_gate(self) -> bool:
        """Returns True if each half of the columns consists of whole panels of one kind."""
        return len(self._parts) == 1 and self._columns % (2 * COLUMNS) == 0

    def __call__(self, x: Tensor, *, gated: bool = False, unpacks: bool | None = None) -> Tensor:
        """Maps [rows, depth] to [rows, columns], or with `gated` to [rows, columns / 2]: SiLU(first half) * second
        half.

        unpacks: panels are unpacked; None: if that takes less time. Blocks of `by_rows` are always unpacked.
        """
        assert self.can_gate or not gated
        width = self._columns // 2 if gated else self._columns
        out, first = the_team().empty(len(x), padded(width), x.dtype), 0
        for part in self._parts:
            bias = 0 if self._bias is None else self._bias.data_ptr() + first * self._bias.itemsize
            part.multiply(x, out[:, first:], bias, gated=gated, unpacks=unpacks)
            first += part.panels.columns
        return out[:, :width]


def can_multiply(matrices: Sequence[CodedMatrix], dtype: torch.dtype) -> bool:
    """Returns True if there are kernels for these matrices, one below the other, and x of this dtype.

    All but the last are of whole panels.
    """
    return (
        dtype in _DTYPES
        and all(can_pack(matrix) for matrix in matrices)
        and all(matrix.shape[0] % COLUMNS == 0 for matrix in matrices[:-1])
    )


class _Part:
    """A matrix of one kind, and its kernels."""

    def __init__(self, panels: CodedPanels, dtype: str) -> None:
        self.panels = panels
        self._dtype = dtype
        kind, by_amx = (dtype, panels.code, panels.scales), fits_amx(panels, dtype)
        self._kernels = _kernels(*kind, has_offsets=panels.has_offsets, by_amx=by_amx)

    def of_panels(self, begin: int, end: int) -> "_Part":
        """Returns the part of these panels, which shares their memory."""
        return _Part(self.panels.panels(begin, end), self._dtype)

    def multiply(self, x: Tensor, target: Tensor, bias: int, *, gated: bool, unpacks: bool | None) -> None:
        """Writes the product to the target, [rows, columns of whole panels or more]. bias: its address, or 0."""
        if unpacks is None:
            unpacks = len(x) > self._kernels.few_rows
        if the_team().rows_at_once is None and not unpacks:
            self._multiply_few(x, target, bias, gated=gated)
        else:
            self._multiply_many(x, target, bias, gated=gated)

    def _multiply_few(self, x: Tensor, target: Tensor, bias: int, *, gated: bool) -> None:
        own, kernels, team, rows = self.panels, self._kernels, the_team(), len(x)
        prepares = rows <= OWN_ROWS
        copies, sums = self._prepared(x, needs_sums=own.has_offsets, prepares=prepares)
        panels = len(own.memory) // (2 if gated else 1)
        at_once = panels_of_item(team, panels, 1, _LEAST_ITEMS_OF_FEW)
        team.run(
            kernels.few,
            -(-panels // at_once),
            x.data_ptr(),
            x.stride(0),
            *_rows_of(copies),
            *_rows_of(sums),
            rows,
            own.depth,
            int(prepares and (copies is not None or sums is not None)),
            0 if own.order is None else own.order.data_ptr(),
            target.data_ptr(),
            target.stride(0),
            own.memory.data_ptr(),
            own.panel_bytes,
            bias,
            panels,
            *self._steps(),
            own.table.data_ptr(),
            kernels.few_scratch,
            at_once,
            2 if gated else 1,
            at_a_time=1,
        )

    def _multiply_many(self, x: Tensor, target: Tensor, bias: int, *, gated: bool) -> None:
        own, kernels, team, rows = self.panels, self._kernels, the_team(), len(x)
        copies, _ = self._prepared(x, needs_sums=False, prepares=False)
        panels = len(own.memory) // (2 if gated else 1)
        rows_at_once, at_once, _ = items_of(team, rows, panels, MOST_ROWS)
        read = x if copies is None else copies
        team.run(
            kernels.many,
            -(-rows // rows_at_once) * -(-panels // at_once),
            *_rows_of(read),
            rows,
            target.data_ptr(),
            target.stride(0),
            own.memory.data_ptr(),
            own.panel_bytes,
            own.scale_bytes,
            bias,
            panels,
            *self._steps(),
            own.table.data_ptr(),
            kernels.many_scratch,
            rows_at_once,
            at_once,
            2 if gated else 1,
            kernels.configs,
            at_a_time=1,
        )

    def _prepared(self, x: Tensor, *, needs_sums: bool, prepares: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns copies of x, and sums of x over groups; None where x serves as it is, or none are needed.

        prepares: the kernel of the product writes both, each thread in rows of its own; otherwise they are there when
        it begins.
        """
        own, team = self.panels, the_team()
        rows = team.max_threads * OWN_ROWS if prepares else len(x)
        copies = sums = None
        if self._kernels.widens or own.order is not None or own.padded_depth != own.depth:
            copies = own_rows(team, rows, own.padded_depth * (4 if self._kernels.widens else x.itemsize))
        if needs_sums:
            sums = own_rows(team, rows, own.num_groups * 4)
        if not prepares and (copies is not None or sums is not None):
            team.run(
                self._kernels.prepare,
                len(x),
                x.data_ptr(),
                x.stride(0),
                0 if own.order is None else own.order.data_ptr(),
                own.depth,
                own.padded_depth,
                *_rows_of(copies),
                own.group_steps * step_depth(own.code),
                *_rows_of(sums),
            )
        return copies, sums

    def _steps(self) -> tuple[int, int, int]:
        """Returns groups, the steps of a group, and those of the last."""
        own = self.panels
        return own.num_groups, own.group_steps, own.num_steps - (own.num_groups - 1) * own.group_steps


class _Kernels:
    """The kernels of one kind of codes, and their scratch memory."""

    def __init__(self, dtype: str, code: Code, scales: ScaleForm, *, has_offsets: bool, by_amx: bool) -> None:
        self._made_by = partial(_kernels, dtype, code, scales, has_offsets=has_offsets, by_amx=by_amx)
        self.widens = dtype == "bfloat16" and coded_arithmetic(dtype) is Arithmetic.SINGLES
        self.few = coded_matmul.make_few(dtype, code, scales, has_offsets=has_offsets)
        self.many = coded_matmul.make_many(dtype, code, scales, has_offsets=has_offsets, by_amx=by_amx)
        self.few_rows = _FEW_ROWS_BESIDE_AMX if by_amx else FEW_ROWS
        self._configs = block_configs()
        self.configs: int = self._configs.ctypes.data  # their address
        self.prepare = _prepare_kernel(dtype, widens=self.widens)
        self.few_scratch = scratch(coded_products.FEW_SUMS_BYTES)
        self.many_scratch = scratch(coded_products.SCRATCH_BYTES)

    def origin(self) -> "partial[_Kernels]":
        """Returns the call that makes the same in any process."""
        return self._made_by


@cache
def _kernels(dtype: str, code: Code, scales: ScaleForm, *, has_offsets: bool, by_amx: bool) -> _Kernels:
    return _Kernels(dtype, code, scales, has_offsets=has_offsets, by_amx=by_amx)


@cache
def _prepare_kernel(dtype: str, *, widens: bool) -> Kernel:
    return coded_inputs.make_prepare(dtype, widens=widens)


def _rows_of(tensor: Tensor | None) -> tuple[int, int]:
    """Returns the address of a tensor, or 0, and the bytes from row to row."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
