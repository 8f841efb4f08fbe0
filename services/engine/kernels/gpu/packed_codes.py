"""The form in which a GPU's kernels read a matrix of codes: packed once, when a model is loaded.

    codes    uint8[blocks, width, step]   a block is `step` bytes of each output's row: so many codes of 8 bits, or
                                          twice as many of 4 bits: the lower halves, then the upper halves
    scales   [groups, width]              in their stored dtype, as the offsets: outputs lie next to each other
    offsets  [groups, width], or absent

What a program reads of a block is one stretch of memory, whatever the step. Outputs are padded to a multiple of
`WIDEST` and depth to whole blocks, with zeros, so that no load of codes or scales needs a mask.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.kernels.gpu.code_values import CENTRE
from services.engine.quantization.codes import Code, CodedMatrix, Inputs

WIDEST = 128  # outputs of a program, at most
_NARROW = (Code.UINT4, Code.E2M1)
_OWN_CODES = {  # that are multiplied with inputs rounded so
    Inputs.INT8: (Code.INT8, Code.UINT4),
    Inputs.E4M3: (Code.E4M3,),
    Inputs.E4M3_GROUPS: (Code.E4M3,),
}
_LARGEST_STEP, _LARGEST_OF_BYTES = 64, 128  # the second: with inputs of one byte
_SMALLEST_STEP, _SMALLEST_OF_BYTES = 16, 32  # that matrix units take
_NAN = 0x7F  # of e4m3, without its sign


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A matrix [out, in], see above."""

    code: Code
    inputs: Inputs
    shape: tuple[int, int]  # [out, in], without padding
    codes: Tensor  # uint8[..., blocks, width, step]
    scales: Tensor  # [..., groups, width]
    offsets: Tensor | None
    group: int  # numbers of a row with the same scale; all of a row: its depth
    is_centred: bool  # a number is that of its code less CENTRE, times the scale
    order: Tensor | None  # int64[in], as in `CodedMatrix`

    @property
    def step(self) -> int:
        """Returns the bytes of a block that belong to one output."""
        return self.codes.shape[-1]

    @property
    def width(self) -> int:
        """Returns the outputs, with padding."""
        return self.codes.shape[-2]

    @property
    def is_by_rows(self) -> bool:
        """Returns True if all numbers of an output have one scale."""
        return self.group >= self.shape[1]


def can_pack(matrix: CodedMatrix) -> bool:
    """Returns True if there are kernels for a matrix of this kind."""
    return _step(matrix) is not None


class CodeStack:
    """Matrices of one kind, one behind the other, each packed when it comes."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._stack: PackedCodes | None = None  # with offsets if the matrices have some, centred or not
        self._all_centred = True

    def put(self, index: int, matrix: CodedMatrix) -> bool:
        """Packs a matrix into its place. Returns False if it is not of the kind of the first."""
        packed = pack(matrix, centres=False)
        assert packed is not None, matrix.form
        if self._stack is None:
            self._stack = replace(
                packed,
                codes=packed.codes.new_empty(self._num, *packed.codes.shape),
                scales=packed.scales.new_empty(self._num, *packed.scales.shape),
                offsets=None if packed.offsets is None else packed.offsets.new_empty(self._num, *packed.offsets.shape),
            )
        if _kind(packed) != _kind(self._stack):
            return False
        parts = (self._stack.codes, packed.codes), (self._stack.scales, packed.scales)
        for stack, part in (*parts, (self._stack.offsets, packed.offsets)):
            if stack is not None and part is not None:
                stack[index] = part
        self._all_centred = self._all_centred and _is_centred(matrix)
        return True

    def whole(self) -> PackedCodes:
        """Returns all matrices: each tensor has them as its first dimension."""
        assert self._stack is not None, "there are no matrices"
        return replace(self._stack, offsets=None, is_centred=True) if self._all_centred else self._stack


def _kind(packed: PackedCodes) -> tuple[object, ...]:
    return packed.code, packed.inputs, packed.shape, packed.group, packed.scales.dtype, packed.offsets is None


def pack(matrix: CodedMatrix, *, centres: bool = True) -> PackedCodes | None:
    """Packs a matrix on its device; None: no kernel multiplies it. centres: leaves out offsets where that is exact.

    Scales of two levels are packed as one, in float32, and codes of 5 and 6 bits as INT8.
    """
    step, matrix = _step(matrix), matrix.with_one_level().with_simple_codes()
    if step is None:
        return None
    out, depth = matrix.shape
    is_narrow = matrix.code in _NARROW
    of_block = step * 2 if is_narrow else step
    num_blocks, width = -(-depth // of_block), -(-out // WIDEST) * WIDEST
    codes = matrix.codes.new_zeros(width, num_blocks * of_block)
    codes[:out, :depth] = matrix.codes
    blocks = codes.view(width, num_blocks, of_block).transpose(0, 1)
    if is_narrow:
        blocks = blocks[:, :, :step] | (blocks[:, :, step:] << 4)
    is_centred = centres and _is_centred(matrix)
    num_groups = -(-num_blocks * of_block // matrix.group)  # those of padding too
    return PackedCodes(
        code=matrix.code,
        inputs=matrix.inputs,
        shape=(out, depth),
        codes=blocks.contiguous(),
        scales=_transposed(_with_nan(matrix), num_groups, width),
        offsets=None if matrix.offsets is None or is_centred else _transposed(matrix.offsets, num_groups, width),
        group=min(matrix.group, depth),
        is_centred=is_centred,
        order=matrix.order,
    )


def _step(matrix: CodedMatrix) -> int | None:
    """Returns the bytes of a block for one output; None: there are no kernels for the matrix."""
    of_bytes = matrix.inputs is not Inputs.AS_THEY_ARE
    if of_bytes and matrix.code not in _OWN_CODES[matrix.inputs]:
        return None
    if matrix.inputs is Inputs.E4M3_GROUPS and matrix.shape[1] % matrix.group:
        return None
    largest = _LARGEST_OF_BYTES if of_bytes and matrix.code not in _NARROW else _LARGEST_STEP
    if matrix.group >= matrix.shape[1]:
        return largest
    step = min(largest, matrix.group & -matrix.group)  # a power of two that divides the group
    return None if step < (_SMALLEST_OF_BYTES if of_bytes else _SMALLEST_STEP) else step


def _is_centred(matrix: CodedMatrix) -> bool:
    """Returns True if each code less CENTRE, times the scale, is its number."""
    if matrix.code is not Code.UINT4 or matrix.offsets is None or matrix.coarse is not None:
        return False
    return bool((matrix.offsets.float() == matrix.scales.float() * -CENTRE.value).all())


def _with_nan(matrix: CodedMatrix) -> Tensor:
    """Returns the scales, NaN for groups that have a NaN."""
    if matrix.code is not Code.E4M3:
        return matrix.scales
    is_nan = matrix.codes & _NAN == _NAN
    if not is_nan.any():
        return matrix.scales
    scales, (outputs, depths) = matrix.scales.clone(), is_nan.nonzero(as_tuple=True)
    scales[outputs, depths // matrix.group] = torch.nan
    return scales


def _transposed(of_groups: Tensor, num_groups: int, width: int) -> Tensor:
    """Returns numbers of each output and group, [out, groups], as [groups, width]."""
    out, own = of_groups.shape
    transposed = of_groups.new_zeros(max(num_groups, own), width)
    transposed[:own, :out] = of_groups.t()
    return transposed
