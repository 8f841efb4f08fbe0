"""GGUF's blocks as codes: the numbers that they mean are those of the `gguf` library."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

from services.engine.quantization.codes import CodedMatrix, stacked
from services.engine.quantization.gguf_blocks import coded_blocks

TYPES = GGMLQuantizationType
HALVES = {  # and where a block has its float16
    TYPES.Q4_0: (0,),
    TYPES.Q4_1: (0, 2),
    TYPES.Q5_0: (0,),
    TYPES.Q5_1: (0, 2),
    TYPES.Q8_0: (0,),
    TYPES.IQ4_NL: (0,),
    TYPES.Q4_K: (0, 2),
    TYPES.Q5_K: (0, 2),
    TYPES.Q6_K: (208,),
}
KINDS = list(HALVES)
OUT, DEPTH = 7, 768


def stored(kind: GGMLQuantizationType, seed: int, *, largest_scale: bool = False) -> np.ndarray:
    """Returns random rows as a file has them, uint8[OUT, blocks of a row, bytes]: any codes, any finite scales."""
    rng = np.random.default_rng(seed)
    shape = quant_shape_to_byte_shape((OUT, DEPTH), kind)
    of_block, _ = GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, shape, dtype=np.uint8).reshape(OUT, DEPTH // of_block, -1)
    for begin in HALVES[kind]:
        scales = rng.normal(size=(*rows.shape[:2], 1)).astype(np.float16)
        if largest_scale:
            scales[0, 0] = np.finfo(np.float16).max
        rows[:, :, begin : begin + 2] = scales.view(np.uint8)
    return rows


def coded(kind: GGMLQuantizationType, rows: np.ndarray) -> CodedMatrix:
    matrix = coded_blocks(kind, rows)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest_scale", [False, True])
def test_numbers_are_those_of_the_library(kind: GGMLQuantizationType, largest_scale: bool) -> None:
    rows = stored(kind, seed=1, largest_scale=largest_scale)
    expected = torch.from_numpy(dequantize(rows.reshape(OUT, -1), kind).copy())
    assert torch.equal(coded(kind, rows).numbers(torch.float32), expected)


def test_matrices_that_are_alike_become_one() -> None:
    first, second = (coded(TYPES.Q4_0, stored(TYPES.Q4_0, seed)) for seed in (1, 2))
    other = coded(TYPES.Q8_0, stored(TYPES.Q8_0, 3))
    joined, alone = stacked([first, second, other])
    assert torch.equal(
        joined.numbers(torch.float32), torch.cat([first.numbers(torch.float32), second.numbers(torch.float32)])
    )
    assert alone is other
    assert torch.equal(
        joined.rows(OUT - 1, OUT + 1).numbers(torch.float32), joined.numbers(torch.float32)[OUT - 1 : OUT + 1]
    )
