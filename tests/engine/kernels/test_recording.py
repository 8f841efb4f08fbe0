"""Kernels that run as one: recorded once and run again on other inputs, or run for some rows after the others."""

from functools import partial

import pytest
import torch

from services.engine.kernels.cpu.operations import FusedOperations
from services.engine.kernels.cpu.recording import RowBlocks
from services.engine.kernels.cpu.team import rows_of_a_block, the_team

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


def test_a_thread_more_than_the_team_has_cores_for_finds_nothing_to_do(
    operations: FusedOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one core with --num-threads 2: the second thread waits for the first, and offers its core meanwhile."""
    rows = 20_000  # so many that the wait is long
    weight, x, y = random(64), random(rows, 64), random(rows, 64, seed=1)
    expected = layers(operations, x.clone(), y, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(the_team(), "max_threads", 1)
    try:
        found = operations.replay(object(), (x, y), partial(layers, operations, x, y, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


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


@pytest.mark.parametrize("rows_of_each", [50, 97, 193, 400, 1000])
def test_rows_after_the_others_are_what_all_at_once_are(operations: FusedOperations, rows_of_each: int) -> None:
    rows = rows_of_each * the_team().num_threads - 1
    assert (rows_of_a_block(rows, 64 * 4, the_team().num_threads) is None) == (rows_of_each == 50)
    weight, x, y = random(64), random(rows, 64), random(rows, 64, seed=1)
    copy = x.clone()
    expected = layers(operations, copy, y, weight)
    found = operations.by_rows(rows, 64 * 4, partial(layers, operations, x, y, weight))
    assert torch.equal(found, expected)
    assert torch.equal(x, copy)


def test_all_results_are_whole(operations: FusedOperations) -> None:
    """Also those that later ones are made from, and views of them."""
    rows = 300 * the_team().num_threads
    weight, x, y = random(64), random(rows, 64), random(rows, 64, seed=1)
    copy = x.clone()
    first = operations.add_norm(copy, y, weight, EPS)
    second = operations.add_norm(copy, first, weight, EPS)

    def body() -> tuple[torch.Tensor, ...]:
        between = operations.add_norm(x, y, weight, EPS)
        return between[:, 32:], operations.add_norm(x, between, weight, EPS)

    found = operations.by_rows(rows, 64 * 4, body)
    assert torch.equal(found[0], first[:, 32:])
    assert torch.equal(found[1], second)


def test_rows_of_what_fails_are_not_computed(operations: FusedOperations) -> None:
    weight, x, y = random(64), random(300, 64), random(300, 64, seed=1)
    before = x.clone()

    def fails() -> torch.Tensor:
        operations.add_norm(x, y, weight, EPS)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        operations.by_rows(300, 64 * 4, fails)
    assert torch.equal(x, before)
    expected = layers(operations, x.clone(), y, weight)
    assert torch.equal(operations.by_rows(300, 64 * 4, partial(layers, operations, x, y, weight)), expected)


def test_each_thread_has_memory_for_a_block() -> None:
    """Also where the last block has fewer rows than the others, and the thread that has it could take a whole one."""
    made = RowBlocks(rows=193, rows_at_once=112, max_threads=2).empty(193, 64, torch.float32)
    assert len(made) == 193
    assert made.untyped_storage().nbytes() >= 2 * 112 * made.stride(0) * 4


@pytest.mark.parametrize(
    ("rows", "row_bytes", "threads", "expected"),
    [
        (1848, 5632, 2, 240),  # eight blocks
        (462, 5632, 2, 128),  # two for each thread, so that one that is held up can be helped
        (300, 5632, 2, 160),  # one for each
        (190, 5632, 2, 96),
        (150, 5632, 2, None),  # a thread would have too few
        (190, 5632, 1, 96),
        (1848, 5632, 16, 128),
        (1848, 11520, 2, 144),
        (1848, 20000, 2, None),  # of what fits into a cache there would be too few
    ],
)
def test_blocks_are_as_many_for_each_thread(rows: int, row_bytes: int, threads: int, expected: int | None) -> None:
    assert rows_of_a_block(rows, row_bytes, threads) == expected
