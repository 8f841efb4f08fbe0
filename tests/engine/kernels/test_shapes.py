"""Some kernels of some classes at one of their shapes, others in every run; `shapes` runs them all."""

import random

import pytest

from services.engine.kernels.cpu.isa import ISAS
from tests.engine.kernels.class_process import run_emulated
from tests.engine.kernels.shapes import Shape, all_shapes, run_seed
from tests.machine import GCC, needs

NUM_SHAPES = 2  # of which each takes seconds to compile
STEPS = 24  # of each
BROKEN = Shape("amx", "tiles", "bfloat16", 80, 4, 16)  # whose 65536 // 96 rows are no whole pairs of vectors


@pytest.mark.few(1)
@needs(GCC)
@pytest.mark.parametrize("number", range(NUM_SHAPES))
def test_a_kernel_at_the_borders_of_its_shape(number: int) -> None:
    """Another one in each run."""
    seed = random.SystemRandom().randrange(2**32)
    assert run_seed(seed, STEPS) == [], f"python -m tests.engine.kernels.shapes --one {seed} --steps {STEPS}"


def test_every_shape_is_among_them() -> None:
    shapes = all_shapes(isa.name for isa in ISAS)
    assert len(set(shapes)) == len(shapes) == 4 * 2 * (2 * 29 * 8 * 2 + 4)
    assert {shape.block_size for shape in shapes if shape.head_dim == 80} == {8, 16, 32, 64}


@pytest.mark.long
@needs(GCC)
def test_rows_that_are_no_whole_vectors_are_found() -> None:
    """A planted bug: tiles have as many rows as caches have room for."""
    found = run_emulated("amx", "tests.engine.kernels.test_shapes:run_with_odd_rows", STEPS)
    assert any("not a number" in failure for failure in found), found


def run_with_odd_rows(steps: int) -> list[str]:
    """In a process of its own."""
    from services.engine.kernels.cpu.tile_products import TileProducts
    from tests.engine.kernels.shapes import failures

    TileProducts.max_rows = property(lambda products: products.most_rows)  # type: ignore[assignment]
    return failures([BROKEN], steps, 0)
