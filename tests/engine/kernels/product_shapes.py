"""Products and small kernels at each border of rows, columns and depths that their code computes.

The threads' memory is NaN before each product.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from services.engine.kernels.cpu import int8_matmul, matmul
from services.engine.kernels.cpu.amx import int8_matmul as amx_int8_matmul
from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.packed_linear import PackedLinear
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scratch import scratch_memory
from services.engine.kernels.cpu.team import the_team
from services.engine.kernels.cpu.vectors import LANES
from services.engine.models.linear import KernelProduct, Linear
from tests.engine.kernels import test_small
from tests.engine.kernels.attention_shapes import POISON, beside, some_of
from tests.engine.kernels.int8_products import assert_product, random_rows, random_weight
from tests.engine.kernels.shapes import HEAD_DIMS
from tests.engine.kernels.test_packed_linear import assert_gated, assert_within_bound, make, random

_BLOCK = amx_matmul.BLOCK
_SMALL_ROWS = 3
_NORMS = ((False, False), (True, False), (True, True))  # of rotated heads: with a norm, its weight in float32


def _depths(dtype: torch.dtype) -> list[int]:
    """At which a product is cut, and beside it by a step of register tiles and of AMX."""
    step = 2 if dtype == torch.bfloat16 else 1
    most = matmul.MOST_DEPTH, amx_matmul._MOST_STEPS * _BLOCK
    borders = {_BLOCK, *most, *(2 * depth for depth in most)}
    return sorted({border + side for border in borders for side in (-_BLOCK, -step, 0, step, _BLOCK)} - {0})


def _columns() -> list[int]:
    """Some of them pairs of panels, which AMX takes."""
    panels = beside(1, matmul.PANELS_TOGETHER, 2 * amx_matmul._UNITS_TOGETHER)
    return [*(count * COLUMNS for count in panels), COLUMNS + 2, 3 * COLUMNS - 2]


def _rows() -> list[int]:
    return beside(1, ISA.tile_rows, 2 * ISA.tile_rows, _BLOCK // 2, _BLOCK, matmul.MOST_ROWS)


@dataclass(frozen=True)
class Product:
    """A matrix product, and the same gated."""

    rows: int
    columns: int
    depth: int
    has_bias: bool
    in_blocks: bool  # of rows; else all at once


def products(dtype: torch.dtype) -> list[Product]:
    """All rows with all columns and depths."""
    rows = [*((some, False) for some in _rows()), *((some, True) for some in beside(2 * matmul.MOST_ROWS))]
    of_all = itertools.product(rows, _columns(), _depths(dtype), (False, True))
    return [Product(some, columns, depth, has_bias, blocks) for (some, blocks), columns, depth, has_bias in of_all]


def product_failures(dtype: torch.dtype, most: int | None, seed: int) -> Iterator[str]:
    """Multiplies at most so many times, and says which products failed."""
    for product in some_of(products(dtype), most, seed):
        x, weight = (
            random(product.rows, product.depth, dtype=dtype),
            random(product.columns, product.depth, dtype=dtype),
        )
        bias = random(product.columns, dtype=dtype) if product.has_bias else None
        linear = make(product.columns, product.depth, dtype, bias)
        try:
            found, *gated = _multiply(linear, x, in_blocks=product.in_blocks)
            assert_within_bound(found, x, weight, bias)
            for each in gated:
                assert_gated(each, found)
        except AssertionError as error:
            yield f"{product} {dtype}: {error}"


def int8_depths() -> list[int]:
    """At which codes are filled up, and at which a product is cut."""
    cut = int8_matmul.MOST_STEPS * int8_matmul.DEPTH_OF_STEP
    return beside(int8_matmul.DEPTH_OF_STEP, LANES, amx_int8_matmul.DEPTH, cut, 2 * cut)


def int8_failures(dtype: torch.dtype, most: int | None, seed: int) -> Iterator[str]:
    """Multiplies in int8 at most so many times, and says which products failed."""
    rows = [*((some, False) for some in _rows()), *((some, True) for some in beside(2 * matmul.MOST_ROWS))]
    for case in some_of(list(itertools.product(rows, _columns(), int8_depths(), (False, True))), most, seed):
        (count, in_blocks), columns, depth, has_bias = case
        weight, x = random_weight(columns, depth, has_bias=has_bias), random_rows(count, depth, dtype)
        kernel = weight.linear(dtype)
        scratch_memory(kernel._kernels.scratch_bytes).fill(POISON)
        try:
            found, *gated = _products(kernel, x, in_blocks=in_blocks)
            assert_product(found, x, weight)
            for each in gated:
                assert_gated(each, found)
        except AssertionError as error:
            yield f"int8 {case} {dtype}: {error}"


def _multiply(linear: Linear, x: torch.Tensor, *, in_blocks: bool) -> tuple[torch.Tensor, ...]:
    """The product, and the gated one if the kernel gates it, with all rows at once or in blocks of rows."""
    assert isinstance(linear._kernel, PackedLinear)
    scratch_memory(linear._kernel._kernels.scratch_bytes).fill(POISON)
    return _products(linear._kernel, x, in_blocks=in_blocks)


def _products(kernel: KernelProduct, x: torch.Tensor, *, in_blocks: bool) -> tuple[torch.Tensor, ...]:
    def products() -> tuple[torch.Tensor, ...]:
        return (kernel(x), kernel(x, gated=True)) if kernel.can_gate else (kernel(x),)

    return the_team().by_rows(len(x), x.shape[1] * x.itemsize, products) if in_blocks else products()


def small_failures(dtype: torch.dtype, most: int | None, seed: int) -> Iterator[str]:
    """Runs the tests of small kernels at no more than so many widths, and says which failed."""
    operations, rotate = test_small.test_they_compute_what_torch_computes, test_small.test_heads_are_rotated_in_place
    cases = [
        *(partial(operations, _SMALL_ROWS, width) for width in beside(*range(LANES, max(HEAD_DIMS) + 1, LANES))),
        *(
            partial(rotate, head_dim, rotary_dim, *norm)
            for head_dim in HEAD_DIMS
            for rotary_dim in (head_dim, head_dim * 3 // 4)
            for norm in _NORMS
        ),
        *(partial(test_small.test_masks_leave_no_other_tokens, vocab) for vocab in beside(32, 64, 256)),
    ]
    for case in some_of(cases, most, seed):
        try:
            case(dtype)
        except AssertionError as error:
            yield f"{case.func.__name__}{case.args} {dtype}: {error}"
