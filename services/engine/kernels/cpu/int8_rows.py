"""Rows of x as a product in int8 reads them: see `quantize_rows`."""

from functools import cache, partial

from torch import Tensor

from services.engine.kernels.cpu.int8_matmul import DEPTH_OF_STEP
from services.engine.kernels.cpu.quantize_rows import make_quantize
from services.engine.kernels.cpu.register_tiles import Arithmetic, arithmetic_of_codes
from services.engine.kernels.cpu.scratch import LINE_BYTES, own_rows, whole_lines
from services.engine.kernels.cpu.team import Team


class Int8Rows:
    """Makes codes of rows of one dtype."""

    def __init__(self, dtype: str) -> None:
        splits = arithmetic_of_codes() is Arithmetic.SPLIT_BYTES
        self._kernel, self._code_bytes = make_quantize(dtype, splits=splits), 2 if splits else 1
        self._dtype = dtype

    def origin(self) -> "partial[Int8Rows]":
        """Returns the call that makes the same in any process."""
        return partial(int8_rows, self._dtype)

    def read(
        self, team: Team, x: Tensor, num_rows: int, steps: int, of_rows: int = 0, there: int = 0
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Returns codes of rows of x, with their scales, and the arguments by which kernels of products find them: the
        address, the bytes from row to row, the byte of a row at which its scale is.

        steps: of a product. of_rows: address of the row of x of each one, int32; 0: x has them in their order. there:
        address of how many rows there are, int32, at most `num_rows`; 0: so many.
        """
        scale_at = whole_lines(steps * DEPTH_OF_STEP * self._code_bytes)
        codes = own_rows(team, num_rows, scale_at + LINE_BYTES)
        of_codes = codes.data_ptr(), codes.stride(0)
        team.run(self._kernel, num_rows, x.data_ptr(), x.stride(0), of_rows, there, *of_codes, x.shape[1], scale_at)
        return codes, (*of_codes, scale_at)


@cache
def int8_rows(dtype: str) -> Int8Rows:
    """Returns what makes codes of rows of this dtype."""
    return Int8Rows(dtype)
