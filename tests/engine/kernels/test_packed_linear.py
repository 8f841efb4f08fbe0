"""Products by AMX are oneDNN's of the same packed weight."""

import pytest
import torch
from torch.nn import functional

from services.engine.kernels.team import the_team
from services.engine.models.linear import Linear
from tests.machine import AMX, needs

pytestmark = needs(AMX)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the order in which the products are added up: a rounding to bfloat16 here and there."""
    torch.testing.assert_close(found, expected, atol=2e-3 * float(expected.abs().max()), rtol=2**-7)
    assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(128, 32), (192, 96), (1280, 768), (640, 4864)])
def test_every_number_of_rows(columns: int, depth: int, with_bias: bool) -> None:
    weight, bias = random(columns, depth), random(columns) if with_bias else None
    fused, plain = Linear(weight, bias, fused=True), Linear(weight, bias)
    assert fused.is_kernel
    assert not plain.is_kernel
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 63, 97, 460):
        x = random(rows, depth)
        assert_close(fused(x), plain(x))
        assert_close(fused.gated(x, silu_mul), plain.gated(x, silu_mul))


@pytest.mark.parametrize("rows_of_each", [100, 240, 256])
def test_many_units_of_long_rows(rows_of_each: int) -> None:
    """Groups of units along parts of the depth, by one thread: as in blocks of rows."""
    weight, bias = random(1152, 4160), random(1152)
    fused, plain = Linear(weight, bias, fused=True), Linear(weight, bias)
    rows = 2 * rows_of_each * the_team().num_threads
    x = random(rows, 4160)
    found = the_team().by_rows(rows, 4160 * 2, lambda: (fused(x), fused.gated(x, silu_mul)))
    assert_close(found[0], plain(x))
    assert_close(found[1], plain.gated(x, silu_mul))


def test_rows_that_lie_apart() -> None:
    fused = Linear(random(128, 64), None, fused=True)
    x = random(5, 96)
    assert torch.equal(fused(x[:, :64]), fused(x[:, :64].contiguous()))


def test_large_gates_do_not_overflow() -> None:
    fused = Linear(1e4 * random(128, 32), None, fused=True)
    x = random(3, 32)
    found, expected = fused.gated(x, silu_mul), silu_mul(fused(x))
    assert found.isfinite().all()
    assert_close(found, expected)


@pytest.mark.parametrize(("columns", "depth"), [(96, 64), (128, 48), (50, 64)])
def test_other_shapes_are_onednns(columns: int, depth: int) -> None:
    weight, x = random(columns, depth), random(3, depth)
    fused = Linear(weight, None, fused=True)
    assert not fused.is_kernel
    assert_close(fused(x), functional.linear(x, weight))
