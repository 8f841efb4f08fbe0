"""Products of GGUF's blocks with scales of two levels, as files have them: against the format's library in float64."""

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from services.engine.kernels.cpu.coded_linear import FEW_ROWS, CodedLinear
from services.engine.kernels.cpu.coded_panels import pack_codes
from services.engine.kernels.cpu.coded_rows import decoded_rows
from services.engine.quantization.codes import CodedMatrix, stacked
from services.engine.quantization.gguf_blocks import coded_blocks
from tests.engine.kernels.coded_matrices import assert_close
from tests.engine.kernels.test_packed_linear import BOTH, random
from tests.gguf_files import random_blocks

TYPES = GGMLQuantizationType
DEPTH = 2304  # longer than what is unpacked at a time


def stored(kind: GGMLQuantizationType, columns: int, seed: int) -> tuple[CodedMatrix, torch.Tensor]:
    """A matrix in codes, and its numbers as the library has them."""
    rows = random_blocks(kind, (columns, DEPTH), seed)
    matrix = coded_blocks(kind, rows.reshape(columns, DEPTH // 256, -1))
    assert matrix is not None
    return matrix, torch.from_numpy(dequantize(rows, kind).copy())


@BOTH
def test_several_kinds_in_one_product(dtype: torch.dtype) -> None:
    """As Q, K and V of a file whose V has more bits; columns are no whole panels."""
    parts = [stored(kind, columns, 1) for kind, columns in ((TYPES.Q4_K, 64), (TYPES.Q4_K, 32), (TYPES.Q6_K, 33))]
    matrices, numbers = stacked(matrix for matrix, _ in parts), torch.cat([own for _, own in parts])
    assert [matrix.shape[0] for matrix in matrices] == [96, 33]
    linear = CodedLinear(matrices, None, dtype)
    for rows in (1, 5, FEW_ROWS, 2 * FEW_ROWS):
        x = random(rows, DEPTH, dtype=dtype)
        assert_close(linear(x) / 16, x, numbers / 16, None)  # its bound is for codes of numbers as small as that


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K])
def test_rows_of_an_embedding(kind: GGMLQuantizationType) -> None:
    matrix, numbers = stored(kind, 75, 2)
    ids = torch.tensor([74, 0, 31, 32, 74])
    found = decoded_rows(pack_codes(matrix), ids, torch.float32)
    assert torch.equal(found, numbers[ids])


@pytest.mark.parametrize(("kind", "bits"), [(TYPES.Q4_K, 4.625), (TYPES.Q5_K, 5.625), (TYPES.Q6_K, 6.5625)])
def test_panels_are_as_large_as_codes_and_both_levels_of_scales(kind: GGMLQuantizationType, bits: float) -> None:
    matrix, _ = stored(kind, 64, 3)
    assert pack_codes(matrix).memory.nbytes * 8 == 64 * DEPTH * bits == matrix.nbytes * 8
