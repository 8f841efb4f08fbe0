"""Products of weights in codes, of every class of processors, against those in float64 of the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from services.engine.kernels.cpu.coded_linear import FEW_ROWS, CodedLinear, can_multiply
from services.engine.kernels.cpu.coded_matmul import OWN_ROWS
from services.engine.kernels.cpu.coded_panels import pack_codes
from services.engine.kernels.cpu.coded_rows import decoded_rows
from services.engine.kernels.cpu.coded_tiles import CODED_ROWS
from services.engine.kernels.cpu.matmul import MOST_DEPTH, MOST_ROWS
from services.engine.kernels.cpu.team import the_team
from services.engine.quantization.codes import Code
from tests.engine.kernels.coded_matrices import KINDS, Kind, assert_close, coded
from tests.engine.kernels.test_packed_linear import BOTH, assert_gated, random

ROWS = (1, OWN_ROWS, OWN_ROWS + 1, CODED_ROWS, CODED_ROWS + 1, FEW_ROWS, FEW_ROWS + 1, 70)


# The first, and the first of the other half, are what a demo model has.
_CASES = [(kind, torch.bfloat16) for kind in KINDS] + [(kind, torch.float32) for kind in KINDS]
EACH = pytest.mark.parametrize(("kind", "dtype"), _CASES, ids=lambda value: str(value))


@pytest.mark.few(2)
@EACH
def test_every_number_of_rows(kind: Kind, dtype: torch.dtype) -> None:
    matrix = coded(kind, 192, 224, 32)
    bias = random(192, dtype=dtype)
    linear = CodedLinear([matrix], bias, dtype)
    for rows in ROWS:
        x = random(rows, 224, dtype=dtype)
        assert_close(linear(x), x, matrix, bias)
        assert_gated(linear(x, gated=True), linear(x))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("columns", "depth", "group"),
    [(33, 70, 32), (96, 2, 2048), (1, 97, 16), (64, MOST_DEPTH + 130, 128), (64, 2 * MOST_DEPTH + 6, 10_000)],
)
@EACH
def test_depths_that_are_no_whole_groups(columns: int, depth: int, group: int, kind: Kind, dtype: torch.dtype) -> None:
    """Nor whole steps, and groups as long as a row, which is longer than what is unpacked at a time."""
    matrix = coded(kind, columns, depth, group)
    linear = CodedLinear([matrix], None, dtype)
    for rows in (1, FEW_ROWS, 2 * FEW_ROWS):
        x = random(rows, depth, dtype=dtype)
        assert_close(linear(x), x, matrix, None)


@BOTH
def test_long_rows(dtype: torch.dtype) -> None:
    """In parts, whose sums are kept, and as many rows as an item takes and more."""
    matrix, x = coded(KINDS[0], 128, MOST_DEPTH + 96, 32), random(MOST_ROWS + 40, MOST_DEPTH + 96, dtype=dtype)
    linear = CodedLinear([matrix], None, dtype)
    for rows in (1, FEW_ROWS + 1, MOST_ROWS + 40):
        assert_close(linear(x[:rows]), x[:rows], matrix, None)


@BOTH
def test_inputs_in_another_order(dtype: torch.dtype) -> None:
    matrix = coded(KINDS[0], 96, 130, 32, ordered=True)
    linear = CodedLinear([matrix], None, dtype)
    for rows in (1, FEW_ROWS, 2 * FEW_ROWS):
        x = random(rows, 130, dtype=dtype)
        assert_close(linear(x), x, matrix, None)


@pytest.mark.long
@BOTH
def test_matrices_of_several_kinds_one_below_the_other(dtype: torch.dtype) -> None:
    matrices = [coded(kind, columns, 96, 32) for kind, columns in zip(KINDS[::5], (64, 32, 40), strict=False)]
    width = sum(matrix.shape[0] for matrix in matrices)
    bias, numbers = random(width, dtype=dtype), torch.cat([matrix.numbers(torch.float32) for matrix in matrices])
    linear = CodedLinear(matrices, bias, dtype)
    assert not linear.can_gate
    for rows in (1, 2 * FEW_ROWS):
        x = random(rows, 96, dtype=dtype)
        whole = linear(x)
        assert_close(whole, x, numbers, bias)
        for begin, end in ((0, 64), (64, 96), (32, 136), (96, width)):
            part = linear.columns(begin, end)
            assert part is not None
            assert torch.equal(part(x), whole[:, begin:end])
    assert linear.columns(0, 70) is None
    assert linear.columns(16, 64) is None


@BOTH
def test_rows_that_lie_apart_and_blocks_of_rows(dtype: torch.dtype) -> None:
    matrix = coded(KINDS[0], 128, 64, 32)
    linear, x = CodedLinear([matrix], None, dtype), random(2 * FEW_ROWS, 96, dtype=dtype)
    for rows in (3, 2 * FEW_ROWS):
        apart = x[:rows, :64]
        assert torch.equal(linear(apart), linear(apart.contiguous()))
    many = random(600, 64, dtype=dtype)
    found = the_team().by_rows(600, 128 * many.itemsize, lambda: (linear(many), linear(many, gated=True)))
    assert_close(found[0], many, matrix, None)
    assert_gated(found[1], found[0])


@BOTH
def test_a_recording_multiplies_other_inputs(dtype: torch.dtype) -> None:
    matrix = coded(KINDS[0], 128, 70, 32)
    linear, key = CodedLinear([matrix], None, dtype), object()
    for rows in (1, FEW_ROWS, 2 * FEW_ROWS):
        for x in random(3, rows, 70, dtype=dtype):
            found = the_team().replay((key, rows), [x], lambda x=x: linear(x))  # type: ignore[misc]
            assert_close(found, x, matrix, None)


@BOTH
def test_a_recording_keeps_results_that_are_read_later(dtype: torch.dtype) -> None:
    """Copies of x, which are as wide as results, are not where results are."""
    linear = CodedLinear([coded(KINDS[0], 96, 96, 32, ordered=True)], None, dtype)
    x = random(5, 96, dtype=dtype)

    def body() -> tuple[torch.Tensor, ...]:
        first = linear(x)
        second = linear(first)
        return first, second, linear(second)

    found, expected = the_team().replay(object(), [x], body), body()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.few(2)
@EACH
def test_rows_of_an_embedding(kind: Kind, dtype: torch.dtype) -> None:
    for depth, group, ordered in ((70, 16, True), (64, 32, False), (9, 100, False)):
        matrix = coded(kind, 75, depth, group, ordered=ordered)
        ids = torch.tensor([74, 0, 31, 32, 74])
        found = decoded_rows(pack_codes(matrix), ids, dtype)
        expected = matrix.numbers(dtype)[ids]
        if kind.scales == "float32":  # what a float32 scale has multiplied is rounded; a shift may come before or after
            assert torch.allclose(found, expected, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        else:
            assert torch.equal(found, expected)


def test_what_no_kernel_multiplies() -> None:
    matrix = coded(KINDS[0], 64, 100, 32)
    assert can_multiply([matrix], torch.bfloat16)
    assert not can_multiply([matrix], torch.float16)
    assert not can_multiply([coded(KINDS[0], 64, 100, 33)], torch.bfloat16)  # groups begin inside a step
    assert not can_multiply([coded(KINDS[0], 50, 100, 32), matrix], torch.bfloat16)  # inside a panel
    assert not can_multiply([coded(KINDS[0], 64, 9000, 3000)], torch.bfloat16)
    of_q4_k = coded(KINDS[-1], 64, 256, 32)
    assert can_multiply([of_q4_k], torch.bfloat16)
    signed = replace(of_q4_k, scales=of_q4_k.scales.view(torch.int8), offsets=of_q4_k.scales.view(torch.int8))
    assert not can_multiply([signed], torch.bfloat16)
    (fp8,) = [kind for kind in KINDS if kind.code is Code.E4M3 and kind.scales == "float32"]
    damaged = coded(fp8, 64, 100, 32)
    damaged.codes[3, 4] = 0xFF
    assert not can_multiply([damaged], torch.bfloat16)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_errors_in_bfloat16_are_no_larger_than_torchs(kind: Kind) -> None:
    """torch's over the same numbers, rounded to bfloat16."""
    matrix, x = coded(kind, 256, 1024, 32), random(2 * FEW_ROWS, 1024, dtype=torch.bfloat16)
    exact = x.double() @ matrix.numbers(torch.float32).double().T
    of_torch = error(functional.linear(x, matrix.numbers(torch.bfloat16)), exact)
    linear = CodedLinear([matrix], None, torch.bfloat16)
    for rows in (FEW_ROWS, 2 * FEW_ROWS):
        assert error(linear(x[:rows]), exact[:rows]) <= 1.05 * of_torch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())
