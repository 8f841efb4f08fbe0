"""Matrices of codes in panels, which products read as one stream of memory.

A panel has 32 columns of y, as in `matmul`. Group by group of the depth it holds the codes of all 32 columns, step by
step, then their scales, then their offsets, if there are any:

    codes of 4 bits  a step is a depth of 8: a word of 32 bits for each column. Bits 4 n to 4 n + 3 hold the code at
                     depth 2 n for n < 4, and at depth 2 n - 7 for others: shifted by 4 p, the lower bits of both halves
                     of a word are the pair p.
    codes of 8 bits  a step is a depth of 2: a byte for each column, twice

The depth is filled up to whole steps with codes of 0, for which x has zeros; the columns to whole panels, with scales
and offsets of 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.matmul import MOST_DEPTH, WEIGHTS, padded
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.quantization.codes import Code, CodedMatrix

_LOWER, _UPPER = [0, 4, 1, 5], [2, 6, 3, 7]  # depths of the halves of the four bytes of a word
_PANELS_AT_ONCE = 64
_NAN = 0x7F  # of E4M3, with either sign


def step_depth(code: Code) -> int:
    """Returns the depth of a step."""
    return 8 if code.bits == 4 else 2


def step_bytes(code: Code) -> int:
    """Returns the bytes of a panel's codes in a step."""
    return COLUMNS * step_depth(code) * code.bits // 8


def can_pack(matrix: CodedMatrix) -> bool:
    """Returns True if there are kernels for such a matrix, which lies in a CPU's memory.

    A group is of whole steps, and not longer than what is unpacked at a time, unless it is a whole row. What E4M3 has
    of codes for no number is unpacked, so that it is found. Inputs are multiplied as they are, whatever a checkpoint
    says of them: rounding them would save nothing here.
    """
    groups = matrix.scales.shape[1]
    return (
        matrix.codes.device.type == "cpu"
        and matrix.shape[1] > 0
        and (groups == 1 or (matrix.group % step_depth(matrix.code) == 0 and matrix.group <= MOST_DEPTH))
        and (matrix.code is not Code.E4M3 or not bool(((matrix.codes & _NAN) == _NAN).any()))
    )


@dataclass(frozen=True, slots=True, eq=False)
class CodedPanels:
    """A matrix [columns, depth] in panels."""

    code: Code
    scale_dtype: torch.dtype
    has_offsets: bool
    columns: int
    depth: int
    group_steps: int
    memory: Tensor  # uint8[panels, bytes of a panel], in huge pages
    table: Tensor  # uint8: the number of each code in float32; of 4 bits, then twice in bfloat16
    order: Tensor | None  # int32[depth]: see `CodedMatrix`

    @property
    def num_steps(self) -> int:
        """Returns the steps of a panel."""
        return -(-self.depth // step_depth(self.code))

    @property
    def num_groups(self) -> int:
        """Returns the groups of a panel."""
        return -(-self.num_steps // self.group_steps)

    @property
    def padded_depth(self) -> int:
        """Returns the depth of all steps."""
        return self.num_steps * step_depth(self.code)

    @property
    def panel_bytes(self) -> int:
        """Returns the bytes from a panel to the next."""
        return self.memory.shape[1]

    def panels(self, begin: int, end: int) -> "CodedPanels":
        """Returns these panels, which share the memory."""
        columns = min(end * COLUMNS, self.columns) - begin * COLUMNS
        return CodedPanels(
            self.code,
            self.scale_dtype,
            self.has_offsets,
            columns,
            self.depth,
            self.group_steps,
            self.memory[begin:end],
            self.table,
            self.order,
        )


def pack_codes(matrix: CodedMatrix, memory: Tensor | None = None) -> CodedPanels:
    """Packs a matrix that `can_pack` accepts.

    memory: for its panels, as one that is packed before has them, with offsets if it has them; None: its own memory, in
    which a constant offset is kept in the table.
    """
    out, depth = matrix.shape
    of_step = step_depth(matrix.code)
    shift = None if memory is not None else _shift(matrix)
    offsets = None if shift is not None else matrix.offsets
    groups, steps = matrix.scales.shape[1], -(-depth // of_step)
    group_steps = steps if groups == 1 else matrix.group // of_step
    of_groups = [part for part in (matrix.scales, offsets) if part is not None]
    if memory is None:
        size = _panel_bytes(matrix, has_offsets=offsets is not None)
        memory = WEIGHTS.empty(torch.Size((padded(out) // COLUMNS, size)), torch.uint8)
    for begin in range(0, len(memory), _PANELS_AT_ONCE):
        rows = slice(begin * COLUMNS, (begin + _PANELS_AT_ONCE) * COLUMNS)
        target = memory[begin : begin + _PANELS_AT_ONCE]
        missing = len(target) * COLUMNS - len(matrix.codes[rows])
        codes = functional.pad(matrix.codes[rows], (0, steps * of_step - depth, 0, missing))
        tails = [_of_panels(functional.pad(part[rows], (0, 0, 0, missing))) for part in of_groups]
        _put(target, _steps(codes, matrix.code), tails, group_steps)
    order = None if matrix.order is None else matrix.order.to(torch.int32)
    table = _table(matrix.code, shift or 0)
    return CodedPanels(
        matrix.code, matrix.scales.dtype, offsets is not None, out, depth, group_steps, memory, table, order
    )


def empty_panels(matrix: CodedMatrix, *shape: int) -> Tensor:
    """Returns memory for panels of matrices like this one, uint8[*shape, panels, bytes of a panel], in huge pages."""
    size = _panel_bytes(matrix, has_offsets=matrix.offsets is not None)
    return WEIGHTS.empty(torch.Size((*shape, padded(matrix.shape[0]) // COLUMNS, size)), torch.uint8)


def _panel_bytes(matrix: CodedMatrix, *, has_offsets: bool) -> int:
    steps = -(-matrix.shape[1] // step_depth(matrix.code))
    tails = matrix.scales.shape[1] * COLUMNS * matrix.scales.itemsize * (2 if has_offsets else 1)
    return steps * step_bytes(matrix.code) + tails


def _put(target: Tensor, codes: Tensor, tails: list[Tensor], group_steps: int) -> None:
    """Writes panels group by group. codes: [panels, steps, bytes]; tails: what follows each group's codes, [panels,
    groups, bytes].
    """
    steps, at = codes.shape[1], 0
    whole = steps // group_steps
    for first, count, size in ((0, whole, group_steps), (whole, 1, steps - whole * group_steps)):
        if size == 0:
            continue
        own = codes[:, first * group_steps : first * group_steps + count * size]
        parts = [own.reshape(len(codes), count, -1), *(tail[:, first : first + count] for tail in tails)]
        joined = torch.cat(parts, dim=2).flatten(1)
        target[:, at : at + joined.shape[1]] = joined
        at += joined.shape[1]


def _steps(codes: Tensor, code: Code) -> Tensor:
    """Returns [panels, steps, bytes] of codes [columns of whole panels, depth of whole steps]."""
    if code.bits == 4:
        words = codes.view(-1, COLUMNS, codes.shape[1] // 8, 8)
        packed = words[..., _LOWER] | (words[..., _UPPER] << 4)
        return packed.transpose(1, 2).flatten(2)
    return codes.view(-1, COLUMNS, codes.shape[1] // 2, 2).permute(0, 2, 3, 1).flatten(2)


def _of_panels(of_groups: Tensor) -> Tensor:
    """Returns uint8[panels, groups, bytes] of numbers [columns of whole panels, groups]."""
    turned = of_groups.view(-1, COLUMNS, of_groups.shape[1]).transpose(1, 2).contiguous()
    return turned.view(torch.uint8)


def _shift(matrix: CodedMatrix) -> int | None:
    """Returns the number that codes of 4 bits may be shifted by instead of all offsets; None: offsets differ, or there
    are none.
    """
    if matrix.offsets is None or matrix.code is not Code.UINT4:
        return None
    scales, offsets = matrix.scales.to(torch.float64), matrix.offsets.to(torch.float64)
    return next((shift for shift in (-8, -7) if torch.equal(scales * shift, offsets)), None)


def _table(code: Code, shift: int) -> Tensor:
    values = code.values() + shift
    if code.bits != 4:
        return values.view(torch.uint8)
    singles, halves = values.view(torch.uint8), values.to(torch.bfloat16).view(torch.uint8)
    return torch.cat((singles, halves, halves))
