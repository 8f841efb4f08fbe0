"""The forms in which panels of codes hold scales and offsets.

Those of one level are numbers. Those of two levels are integers, each multiplied with a float16 for a block of several
groups.
"""

from enum import Enum

import torch

from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.quantization.codes import CodedMatrix

_COARSE_BYTES = COLUMNS * 2


class ScaleForm(Enum):
    """A form: the dtype of what each group has, and the groups of a block; 1: there is one level."""

    FLOAT32 = ("float32", 1)
    FLOAT16 = ("float16", 1)
    BFLOAT16 = ("bfloat16", 1)
    UINT8_BY_8 = ("uint8", 8)  # GGUF's Q4_K and Q5_K
    INT8_BY_16 = ("int8", 16)  # Q6_K

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the scales and offsets of groups."""
        dtype: torch.dtype = getattr(torch, self.value[0])
        return dtype

    @property
    def block_groups(self) -> int:
        """Returns the groups of a block, which is one group if there is one level."""
        return self.value[1]

    @property
    def has_two_levels(self) -> bool:
        """Returns True if scales are products of an integer and a float16."""
        return self.block_groups > 1

    def head_bytes(self, *, has_offsets: bool) -> int:
        """Returns the bytes with which a block of a panel begins: its float16, if there are two levels."""
        return (_COARSE_BYTES * (2 if has_offsets else 1)) if self.has_two_levels else 0

    def tail_bytes(self, *, has_offsets: bool) -> int:
        """Returns the bytes of scales and offsets behind the codes of a group."""
        return COLUMNS * self.dtype.itemsize * (2 if has_offsets else 1)


def scale_form(matrix: CodedMatrix) -> ScaleForm | None:
    """Returns the form of a matrix's scales; None: panels have none for them."""
    groups = 1 if matrix.coarse is None else matrix.coarse.groups
    kinds = (form for form in ScaleForm if (form.dtype, form.block_groups) == (matrix.scales.dtype, groups))
    return next(kinds, None)
