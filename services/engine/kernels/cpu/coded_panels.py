"""Matrices of codes in panels, which products read as one stream of memory.

A panel has 32 columns of y, as in `matmul`. Group by group of the depth it holds the codes of all 32 columns, step by
step, then their scales, then their offsets, if there are any:

    codes of 4 bits  a step is a depth of 8: a word of 32 bits for each column. Bits 4 n to 4 n + 3 hold the code at
                     depth 2 n for n < 4, and at depth 2 n - 7 for others: shifted by 4 p, the lower bits of both halves
                     of a word are the pair p.
    codes of 5 bits  a step is a depth of 32: the lower four bits of the codes, as those of 4 steps of codes of 4 bits;
                     then a word of 32 bits for each column with the upper bits. Bit n of the word's lower half is that
                     of depth 2 n, and of its upper half that of depth 2 n + 1.
    codes of 6 bits  a step is a depth of 16, with the lower bits of 2 steps. Bits 2 n and 2 n + 1 of the halves are the
                     upper bits of depths 2 n and 2 n + 1.
    codes of 8 bits  a step is a depth of 2: a byte for each column, twice

Where scales have two levels, each block of groups begins with its float16 scales, then its offsets (see `scale_forms`).
The depth is filled up to whole steps with codes of 0, for which x has zeros; the columns to whole panels, with scales
and offsets of 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.matmul import MOST_DEPTH, WEIGHTS, padded
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scale_forms import ScaleForm, scale_form
from services.engine.quantization.codes import Code, CodedMatrix

_LOWER, _UPPER = [0, 4, 1, 5], [2, 6, 3, 7]  # depths of the halves of the four bytes of a word
_STEP_DEPTHS = {4: 8, 5: 32, 6: 16, 8: 2}  # by the bits of a code
_PANELS_AT_ONCE = 64
_NAN = 0x7F  # of E4M3, with either sign


def step_depth(code: Code) -> int:
    """Returns the depth of a step."""
    return _STEP_DEPTHS[code.bits]


def step_bytes(code: Code) -> int:
    """Returns the bytes of a panel's codes in a step."""
    return COLUMNS * step_depth(code) * code.bits // 8


def can_pack(matrix: CodedMatrix) -> bool:
    """Returns True if there are kernels for such a matrix, which lies in a CPU's memory.

    A group is of whole steps, and a block of groups not longer than what is unpacked at a time; a group without such
    blocks may be a whole row of any length. What E4M3 has of codes for no number is unpacked, so that it is found.
    Inputs are multiplied as they are, whatever a checkpoint says of them: rounding them would save nothing here.
    """
    if (form := scale_form(matrix)) is None:
        return False
    groups, block = matrix.scales.shape[1], matrix.group * form.block_groups
    return (
        matrix.codes.device.type == "cpu"
        and matrix.shape[1] > 0
        and (groups == 1 or matrix.group % step_depth(matrix.code) == 0)
        and (block <= MOST_DEPTH or (groups == 1 and not form.has_two_levels))
        and (matrix.code is not Code.E4M3 or not bool(((matrix.codes & _NAN) == _NAN).any()))
    )


@dataclass(frozen=True, slots=True, eq=False)
class CodedPanels:
    """A matrix [columns, depth] in panels."""

    code: Code
    scales: ScaleForm
    has_offsets: bool
    columns: int
    depth: int
    group_steps: int
    memory: Tensor  # uint8[panels, bytes of a panel], in huge pages
    table: Tensor  # uint8: the number of each code in float32; below 8 bits, then in bfloat16: of 4 bits, twice
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
    def scale_bytes(self) -> int:
        """Returns the bytes of scales and offsets of a block of groups."""
        tails = self.scales.tail_bytes(has_offsets=self.has_offsets) * self.scales.block_groups
        return self.scales.head_bytes(has_offsets=self.has_offsets) + tails

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
            self.scales,
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
    coarse, form = matrix.coarse, scale_form(matrix)
    assert form is not None
    of_groups = [part for part in (matrix.scales, offsets) if part is not None]
    of_blocks = [] if coarse is None else [part for part in (coarse.scales, coarse.offsets) if part is not None]
    if memory is None:
        size = _panel_bytes(matrix, has_offsets=offsets is not None)
        memory = WEIGHTS.empty(torch.Size((padded(out) // COLUMNS, size)), torch.uint8)
    for begin in range(0, len(memory), _PANELS_AT_ONCE):
        rows = slice(begin * COLUMNS, (begin + _PANELS_AT_ONCE) * COLUMNS)
        target = memory[begin : begin + _PANELS_AT_ONCE]
        missing = len(target) * COLUMNS - len(matrix.codes[rows])
        codes = functional.pad(matrix.codes[rows], (0, steps * of_step - depth, 0, missing))
        heads, tails = (
            [_of_panels(functional.pad(part[rows], (0, 0, 0, missing))) for part in parts]
            for parts in (of_blocks, of_groups)
        )
        _put(target, _steps(codes, matrix.code), heads, tails, group_steps, form.block_groups)
    order = None if matrix.order is None else matrix.order.to(torch.int32)
    table = _table(matrix.code, shift or 0)
    return CodedPanels(matrix.code, form, offsets is not None, out, depth, group_steps, memory, table, order)


def empty_panels(matrix: CodedMatrix, *shape: int) -> Tensor:
    """Returns memory for panels of matrices like this one, uint8[*shape, panels, bytes of a panel], in huge pages."""
    size = _panel_bytes(matrix, has_offsets=matrix.offsets is not None)
    return WEIGHTS.empty(torch.Size((*shape, padded(matrix.shape[0]) // COLUMNS, size)), torch.uint8)


def _panel_bytes(matrix: CodedMatrix, *, has_offsets: bool) -> int:
    steps, form, groups = -(-matrix.shape[1] // step_depth(matrix.code)), scale_form(matrix), matrix.scales.shape[1]
    assert form is not None
    tails = groups * form.tail_bytes(has_offsets=has_offsets)
    heads = -(-groups // form.block_groups) * form.head_bytes(has_offsets=has_offsets)
    return heads + steps * step_bytes(matrix.code) + tails


def _put(
    target: Tensor, codes: Tensor, heads: list[Tensor], tails: list[Tensor], group_steps: int, block_groups: int
) -> None:
    """Writes panels block by block. codes: [panels, steps, bytes]; heads: what a block begins with, [panels, blocks,
    bytes]; tails: what follows each group's codes, [panels, groups, bytes].
    """
    at, block_steps = 0, group_steps * block_groups
    num_blocks = -(-codes.shape[1] // block_steps) if heads else 1
    for block in range(num_blocks):
        for head in heads:
            target[:, at : at + head.shape[2]] = head[:, block]
            at += head.shape[2]
        own = codes[:, block * block_steps : (block + 1) * block_steps] if heads else codes
        groups = slice(block * block_groups, (block + 1) * block_groups) if heads else slice(None)
        at = _put_groups(target, at, own, [tail[:, groups] for tail in tails], group_steps)


def _put_groups(target: Tensor, at: int, codes: Tensor, tails: list[Tensor], group_steps: int) -> int:
    """Writes groups from a byte of each panel on. Returns the byte after them."""
    steps = codes.shape[1]
    whole = steps // group_steps
    for first, count, size in ((0, whole, group_steps), (whole, 1, steps - whole * group_steps)):
        if count * size == 0:
            continue
        own = codes[:, first * group_steps : first * group_steps + count * size]
        parts = [own.reshape(len(codes), count, -1), *(tail[:, first : first + count] for tail in tails)]
        joined = torch.cat(parts, dim=2).flatten(1)
        target[:, at : at + joined.shape[1]] = joined
        at += joined.shape[1]
    return at


def _steps(codes: Tensor, code: Code) -> Tensor:
    """Returns [panels, steps, bytes] of codes [columns of whole panels, depth of whole steps]."""
    if code.bits == 8:
        return codes.view(-1, COLUMNS, codes.shape[1] // 2, 2).permute(0, 2, 3, 1).flatten(2)
    words = codes.view(-1, COLUMNS, codes.shape[1] // 8, 8)
    if code.bits == 4:
        return _words_of_nibbles(words).transpose(1, 2).flatten(2)
    depth, bits = step_depth(code), code.bits - 4
    lower = _words_of_nibbles(words & 15).unflatten(2, (-1, depth // 8)).permute(0, 2, 3, 1, 4)
    pairs = (codes >> 4).to(torch.int32).view(-1, COLUMNS, codes.shape[1] // depth, depth // 2, 2)
    halves = (pairs << (torch.arange(depth // 2) * bits)[:, None]).sum(dim=3).to(torch.int16)
    return torch.cat((lower.flatten(2), halves.view(torch.uint8).transpose(1, 2).flatten(2)), dim=2)


def _words_of_nibbles(words: Tensor) -> Tensor:
    """Returns uint8[..., 4], words of 32 bits, of codes of 4 bits [..., 8]."""
    return words[..., _LOWER] | (words[..., _UPPER] << 4)


def _of_panels(of_groups: Tensor) -> Tensor:
    """Returns uint8[panels, groups, bytes] of numbers [columns of whole panels, groups]."""
    turned = of_groups.view(-1, COLUMNS, of_groups.shape[1]).transpose(1, 2).contiguous()
    return turned.view(torch.uint8)


def _shift(matrix: CodedMatrix) -> int | None:
    """Returns the number that codes of 4 bits may be shifted by instead of all offsets; None: offsets differ, or there
    are none.
    """
    if matrix.offsets is None or matrix.coarse is not None or matrix.code is not Code.UINT4:
        return None
    scales, offsets = matrix.scales.to(torch.float64), matrix.offsets.to(torch.float64)
    return next((shift for shift in (-8, -7) if torch.equal(scales * shift, offsets)), None)


def _table(code: Code, shift: int) -> Tensor:
    values = code.values() + shift
    if code.bits == 8:
        return values.view(torch.uint8)
    singles, halves = values.view(torch.uint8), values.to(torch.bfloat16).view(torch.uint8)
    return torch.cat((singles, halves, halves) if code.bits == 4 else (singles, halves))
