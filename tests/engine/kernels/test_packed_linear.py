"""Products by kernels, of every class of processors, lie within a bound of those in float64 of the same numbers."""

import pytest
import torch
from torch.nn import functional

from services.engine.kernels.cpu.team import the_team
from services.engine.models.linear import Linear
from tests.machine import AMX, needs

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make(columns: int, depth: int, dtype: torch.dtype, bias: torch.Tensor | None = None) -> Linear:
    linear = Linear(random(columns, depth, dtype=dtype), bias, fused=True)
    assert linear.is_kernel
    return linear


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_within_bound(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Half a unit in the last place of the result's dtype, and what adding up in float32 may lose: as many roundings
    as there are products, each of at most 2**-24 of what has been added up by then.
    """
    expected = exact(x, weight, bias)
    magnitude = functional.linear(
        x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs()
    )
    rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-24
    bound = rounding * expected.abs() + 2.0**-24 * x.shape[1] ** 0.5 * 4 * magnitude
    assert ((found.double() - expected).abs() <= bound).all()


def assert_gated(found: torch.Tensor, whole: torch.Tensor) -> None:
    """SiLU(first half of `whole`) * second half, rounded where `transformers` rounds: but for the last place, and in
    float32 what an exponent's own rounding comes to.
    """
    gate, up = whole.chunk(2, dim=-1)
    silu = functional.silu(gate.double()).to(gate.dtype)
    expected = (silu * up).double()
    unit = 2.0**-7 if found.dtype == torch.bfloat16 else 4e-7 * (1 + gate.double().abs())
    smallest = 1e-30 * (1 + up.double().abs())  # of a gate far below 0, what is left may be 0, or next to it
    assert ((found.double() - expected).abs() <= unit * expected.abs() + smallest).all()


@pytest.mark.few(4)
@BOTH
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(128, 32), (192, 96), (1280, 768), (640, 4864)])
def test_every_number_of_rows(columns: int, depth: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight = random(columns, depth, dtype=dtype)
    bias = random(columns, dtype=dtype) if with_bias else None
    linear = make(columns, depth, dtype, bias)
    for rows in (1, 2, 7, 13, 15, 16, 17, 29, 31, 32, 33, 63, 97, 460):
        x = random(rows, depth, dtype=dtype)
        assert_within_bound(linear(x), x, weight, bias)
        assert_gated(linear.gated(x, functional.silu), linear(x))


@pytest.mark.few(2)
@BOTH
@pytest.mark.parametrize("rows_of_each", [100, 240, 256])
def test_many_panels_of_long_rows(rows_of_each: int, dtype: torch.dtype) -> None:
    """Groups of panels along parts of the depth, by one thread: as in blocks of rows."""
    weight, bias = random(1152, 4160, dtype=dtype), random(1152, dtype=dtype)
    linear = make(1152, 4160, dtype, bias)
    rows = 2 * rows_of_each * the_team().num_threads
    x = random(rows, 4160, dtype=dtype)
    found = the_team().by_rows(rows, 4160 * 2, lambda: (linear(x), linear.gated(x, functional.silu)))
    assert_within_bound(found[0], x, weight, bias)
    assert_gated(found[1], found[0])


@BOTH
def test_rows_that_lie_apart(dtype: torch.dtype) -> None:
    linear, x = make(128, 64, dtype), random(5, 96, dtype=dtype)
    assert torch.equal(linear(x[:, :64]), linear(x[:, :64].contiguous()))


@BOTH
def test_large_gates_do_not_overflow(dtype: torch.dtype) -> None:
    weight = 1e4 * random(128, 32, dtype=dtype)
    linear, x = Linear(weight.clone(), None, fused=True), random(3, 32, dtype=dtype)
    found = linear.gated(x, functional.silu)
    assert found.isfinite().all()
    assert_gated(found, linear(x))


@BOTH
@pytest.mark.parametrize(("columns", "depth"), [(96, 64), (128, 48), (50, 64), (33, 70), (1, 2)])
def test_shapes_that_amx_does_not_take(columns: int, depth: int, dtype: torch.dtype) -> None:
    """By register tiles. Half of the columns may be no whole panels, which another kernel gates then."""
    weight = random(columns, depth, dtype=dtype)
    linear = make(columns, depth, dtype)
    for rows in (1, 3, 40):
        x = random(rows, depth, dtype=dtype)
        found = linear(x)
        assert found.shape == (rows, columns)
        assert_within_bound(found, x, weight, None)


def test_an_odd_depth_is_torchs_in_bfloat16() -> None:
    weight, x = random(64, 33, dtype=torch.bfloat16), random(3, 33, dtype=torch.bfloat16)
    linear = Linear(weight, None, fused=True)
    assert not linear.is_kernel
    assert_within_bound(linear(x), x, weight, None)


@needs(AMX)
def test_products_by_amx_are_those_of_register_tiles() -> None:
    """But for the order in which the products are added up: a rounding to bfloat16 here and there."""
    weight, x = random(1280, 768, dtype=torch.bfloat16), random(97, 768, dtype=torch.bfloat16)
    by_amx = Linear(weight.clone(), None, fused=True)
    by_tiles = Linear(functional.pad(weight, (0, 2)), None, fused=True)  # a depth that AMX does not take
    assert (by_amx(x) == by_tiles(functional.pad(x, (0, 2)))).float().mean() > 0.98


@BOTH
@pytest.mark.parametrize("with_bias", [False, True])
def test_some_columns_of_a_product(with_bias: bool, dtype: torch.dtype) -> None:
    """To the bit those of the whole; only panels can be shared."""
    columns, depth = 192, 96
    linear = make(columns, depth, dtype, random(columns, dtype=dtype) if with_bias else None)
    x = random(70, depth, dtype=dtype)
    for begin, end in ((0, 96), (96, 192), (32, 64)):
        part = linear.columns(begin, end)
        assert part is not None
        assert part.is_kernel
        assert torch.equal(part(x), linear(x)[:, begin:end])
    assert linear.columns(0, 80) is None
    assert linear.columns(16, 48) is None
