"""Kernels that run as one: recorded once, run again on other inputs."""

from functools import partial

import pytest
import torch

from services.engine.kernels.fused import FusedOperations

EPS = 1e-5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def operations() -> FusedOperations:
    return FusedOperations("float32")


def layers(operations: FusedOperations, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Several operations, each of which needs what the one before made."""
    for _ in range(12):
        y = operations.add_norm(x, y, weight, EPS)
    return y


def test_a_recording_does_what_its_kernels_do_one_by_one(operations: FusedOperations) -> None:
    weight, key = random(64), object()
    calls = 0

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return layers(operations, x, y, weight)

    for seed in range(4):
        x, y = random(7, 64, seed=seed), random(7, 64, seed=seed + 100)
        copy = x.clone()
        expected = layers(operations, copy, y, weight)
        found = operations.replay(key, (x, y), partial(body, x, y))
        assert torch.equal(found, expected)
        assert torch.equal(x, copy)
    assert calls == 1


def test_keys_are_kept_apart(operations: FusedOperations) -> None:
    weight, first, second = random(64), object(), object()
    for rows, key in ((3, first), (5, second), (3, first), (5, second)):
        x, y = random(rows, 64, seed=rows), random(rows, 64, seed=9)
        expected = layers(operations, x.clone(), y, weight)
        found = operations.replay(key, (x, y), partial(layers, operations, x, y, weight))
        assert torch.equal(found, expected)


def test_what_fails_is_not_kept_and_leaves_nothing_behind(operations: FusedOperations) -> None:
    weight, key = random(64), object()
    x, y = random(3, 64), random(3, 64, seed=1)

    def fails() -> torch.Tensor:
        operations.add_norm(x, y, weight, EPS)
        raise RuntimeError("in the middle")

    before = x.clone()
    with pytest.raises(RuntimeError, match="in the middle"):
        operations.replay(key, (x, y), fails)
    assert torch.equal(x, before)  # nothing ran
    expected = layers(operations, x.clone(), y, weight)
    assert torch.equal(operations.replay(key, (x, y), partial(layers, operations, x, y, weight)), expected)


def test_results_of_many_widths_and_rows_do_not_meet(operations: FusedOperations) -> None:
    """128 rows share buffers, more have larger ones; a width of 512 float32 has rows that are further apart."""
    for rows in (1, 128, 129, 300):
        for width in (16, 512):
            weight, x, y = random(width), random(rows, width), random(rows, width, seed=1)
            expected = layers(operations, x.clone(), y, weight)
            found = operations.replay(object(), (x, y), partial(layers, operations, x, y, weight))
            assert torch.equal(found, expected)
