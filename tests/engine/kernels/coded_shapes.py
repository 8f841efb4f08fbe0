"""Products of codes at each border of rows, columns, depths and groups that their code computes, of one kind of codes.

The threads' memory is NaN before each product.
"""

import itertools
import random as chances
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.engine.kernels.cpu import coded_products, matmul
from services.engine.kernels.cpu.coded_linear import FEW_ROWS, CodedLinear
from services.engine.kernels.cpu.coded_matmul import OWN_ROWS
from services.engine.kernels.cpu.coded_panels import step_depth
from services.engine.kernels.cpu.coded_tiles import CODED_ROWS
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scratch import scratch_memory
from services.engine.kernels.cpu.team import the_team
from tests.engine.kernels.attention_shapes import POISON, beside, some_of
from tests.engine.kernels.coded_matrices import KINDS, Kind, assert_close, coded
from tests.engine.kernels.test_packed_linear import assert_gated, random


@dataclass(frozen=True)
class Product:
    """A product, and the same gated where it can be."""

    rows: int
    columns: int
    depth: int
    group: int
    ordered: bool
    has_bias: bool
    in_blocks: bool  # of rows; else all at once


def products(kind: Kind) -> list[Product]:
    """All rows with all columns, depths and groups."""
    step = step_depth(kind.code)
    rows = [(some, False) for some in beside(OWN_ROWS, CODED_ROWS, FEW_ROWS, matmul.MOST_ROWS)]
    rows += [(some, True) for some in beside(2 * matmul.MOST_ROWS)]
    columns = *(count * COLUMNS for count in beside(1, matmul.PANELS_TOGETHER)), COLUMNS + 2, 3 * COLUMNS - 2
    borders = {1, step, 2 * step, 128, matmul.MOST_DEPTH, 2 * matmul.MOST_DEPTH}
    depths = sorted({border + side for border in borders for side in (-step, -1, 0, 1, step)} - set(range(-step, 1)))
    groups = (2 * step, 32, 128, matmul.MOST_DEPTH, 10 * matmul.MOST_DEPTH)
    of_all = itertools.product(rows, columns, depths, groups, (False, True), (False, True))
    return [
        Product(some, own, depth, group, ordered, has_bias, blocks)
        for (some, blocks), own, depth, group, ordered, has_bias in of_all
    ]


def coded_failures(dtype: torch.dtype, most: int | None, seed: int) -> Iterator[str]:
    """Multiplies at most so many times, with codes of a kind that follows from the seed, and says which failed."""
    kind = chances.Random(f"{dtype} {seed}").choice(KINDS)
    for product in some_of(products(kind), most, seed):
        matrix = coded(kind, product.columns, product.depth, product.group, ordered=product.ordered)
        x = random(product.rows, product.depth, dtype=dtype)
        bias = random(product.columns, dtype=dtype) if product.has_bias else None
        linear = CodedLinear([matrix], bias, dtype)
        try:
            found, *gated = _multiply(linear, x, in_blocks=product.in_blocks)
            assert_close(found, x, matrix, bias)
            for each in gated:
                assert_gated(each, found)
        except AssertionError as error:
            yield f"{product} {kind} {dtype}: {error}"


def _multiply(linear: CodedLinear, x: torch.Tensor, *, in_blocks: bool) -> tuple[torch.Tensor, ...]:
    for num_bytes in (coded_products.FEW_SUMS_BYTES, coded_products.SCRATCH_BYTES):
        scratch_memory(num_bytes).fill(POISON)

    def multiplied() -> tuple[torch.Tensor, ...]:
        return (linear(x), linear(x, gated=True)) if linear.can_gate else (linear(x),)

    return the_team().by_rows(len(x), x.shape[1] * x.itemsize, multiplied) if in_blocks else multiplied()
