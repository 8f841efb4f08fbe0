"""Sums and gathers over ranks, which are real processes, against sums of what all of them come with."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from services.engine.kernels.cpu.operations import FusedOperations
from services.engine.kernels.cpu.shared_ranks import _LEAST_S, RankSizes, SharedRanks
from services.engine.kernels.cpu.team import rows_of_a_block
from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.ranks import RankLostError, part_of
from tests.engine.rank_processes import RankProcesses, rank_processes

EPS, WIDTH, VOCAB, MAX_ROWS, NUM_LAYERS = 1e-5, 100, 301, 420, 3
ROW_BYTES = (100, 12_000, 9_000, 16_000)  # of ranks, of which some have more columns
DTYPES = {2: torch.bfloat16, 4: torch.float32}
GROUPS = [(2, 2, 1), (2, 4, 2), (3, 4, 1), (4, 2, 1), (3, 2, 2), (4, 4, 2)]  # ranks, bytes of a number, threads


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(4) as started:
        yield started


def sizes_of(size: int, item_bytes: int = 4, threads: int = 1) -> RankSizes:
    return RankSizes(size, MAX_ROWS, WIDTH, VOCAB, item_bytes, threads)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def total(parts: list[Tensor]) -> Tensor:
    """The sum in float32, in the order of the ranks, rounded once."""
    wide = parts[0].to(torch.float32)
    for part in parts[1:]:
        wide = wide + part.to(torch.float32)
    return wide.to(parts[0].dtype)


class Layers:
    """A model of norms, whose weights are another rank's on each, and a sum after each of them."""

    def __init__(self, ranks: SharedRanks) -> None:
        self._ranks, self._dtype = ranks, DTYPES[ranks.sizes.item_bytes]
        self.operations = FusedOperations(ranks.sizes.dtype, ranks.blocks)
        self._weights = [
            [numbers(WIDTH, seed=1000 * rank + layer, dtype=self._dtype) for rank in range(ranks.size)]
            for layer in range(NUM_LAYERS)
        ]

    def inputs(self, rows: int, seed: int) -> list[Tensor]:
        return [numbers(rows, WIDTH, seed=100 * seed + rank, dtype=self._dtype) for rank in range(self._ranks.size)]

    def run(self, x: Tensor) -> Tensor:
        """What a rank does: sums beside other kernels, of rows that lie apart too."""
        for weights in self._weights:
            x = self._ranks.sum(self.operations.norm(x, weights[self._ranks.rank], EPS))
        return x

    def expected(self, x: Tensor) -> Tensor:
        for weights in self._weights:
            x = total([self.operations.norm(x, weight, EPS).clone() for weight in weights])
        return x


def run_steps(ranks: SharedRanks, threads: list[int], num_steps: int, seed: int) -> None:
    """Steps of an embedding's sum, layers and gathers, as a model has them; each rank runs the layers in its own way,
    directly or by a recording, and longer steps by rows.
    """
    torch.set_num_threads(threads[ranks.rank])
    layers, key, chance, own = Layers(ranks), object(), random.Random(seed), random.Random(1000 * seed + ranks.rank)
    operations = layers.operations
    for number in range(num_steps):
        rows = chance.choice([1, 3, 17, 33, 400])
        ranks.begin_step(number)
        embedded = layers.inputs(rows, number)
        wider = torch.zeros(rows, WIDTH + 28, dtype=embedded[0].dtype)
        wider[:, :WIDTH] = embedded[ranks.rank]
        x = ranks.sum(wider[:, :WIDTH])
        assert torch.equal(x, total(embedded)), f"step {number}: {rows} rows, embedded"
        expected, body = layers.expected(x), partial(layers.run, x)
        if rows == 400:
            assert ranks.blocks is not None
            assert rows_of_a_block(rows, ranks.blocks.row_bytes, ranks.blocks.threads) is not None
            found = operations.by_rows(rows, ROW_BYTES[ranks.rank], body)
        else:
            found = operations.replay((key, rows), (x,), body) if own.random() < 0.7 else body()
        assert torch.equal(found, expected), f"step {number}: {rows} rows"
        logits = numbers(rows, VOCAB, seed=number, dtype=x.dtype)
        for turn in range(3):
            gather(ranks, logits + turn, slow=own.random() < 0.02)
        ranks.end_step()


def gather(ranks: SharedRanks, whole: Tensor, *, slow: bool) -> None:
    columns = part_of(ranks.rank, ranks.size, VOCAB)
    if slow:
        time.sleep(0.01)
    found = ranks.gather(whole[:, columns.start : columns.stop], VOCAB)
    assert ranks.rank or torch.equal(found, whole)


@pytest.mark.few(4)
@pytest.mark.parametrize(("size", "item_bytes", "threads"), GROUPS)
def test_every_rank_gets_the_sum_of_all_to_the_bit(
    processes: RankProcesses, size: int, item_bytes: int, threads: int
) -> None:
    """Over many steps, whichever way each of them runs the kernels."""
    processes.do(sizes_of(size, item_bytes, threads), run_steps, [threads] * size, 40, size)


def test_ranks_of_different_threads_and_columns_cut_the_same_blocks(
    processes: RankProcesses,
) -> None:
    """With blocks of different borders, each would wait for rows that the other has in a later block."""
    processes.do(sizes_of(2, 4, 2), run_steps, [1, 2], 40, 7)


def record_once(ranks: SharedRanks) -> int:
    """Runs a recording again and again. Returns how often its body was called."""
    layers, calls, x = Layers(ranks), list[int](), torch.empty(0)

    def body() -> Tensor:
        calls.append(1)
        return layers.run(x)

    for number in range(20):
        ranks.begin_step(number)
        x = total(layers.inputs(5, number))
        assert torch.equal(layers.operations.replay("key", (x,), body), layers.expected(x))
        ranks.end_step()
    return len(calls)


def test_a_recording_is_run_again_with_sums(processes: RankProcesses) -> None:
    assert processes.do(sizes_of(2), record_once) == [1, 1]


def compare_with_gloo(ranks: SharedRanks, path: str) -> None:
    dtype = DTYPES[ranks.sizes.item_bytes]
    gloo = GlooRanks(FileStore(path, ranks.size), "sums", ranks.rank, ranks.size, 60.0)
    other = GlooRanks(FileStore(path, ranks.size), "of another model", ranks.rank, ranks.size, 60.0)
    for number, rows in enumerate((1, 5, 130)):
        for each in (ranks, gloo, other):
            each.begin_step(number)
        x = numbers(rows, WIDTH, seed=10 * ranks.rank + number, dtype=dtype)
        found = ranks.sum(x.clone())
        assert torch.equal(found, gloo.sum(x.clone()))
        assert torch.equal(found, other.sum(x.clone()))
        part = numbers(rows, len(part_of(ranks.rank, ranks.size, VOCAB)), seed=ranks.rank, dtype=dtype)
        assert torch.equal(ranks.gather(part, VOCAB), gloo.gather(part, VOCAB))
        for each in (ranks, gloo, other):
            each.end_step()


@pytest.mark.parametrize(("size", "item_bytes"), [(2, 2), (3, 4)])
def test_kernels_join_what_gloo_joins(processes: RankProcesses, size: int, item_bytes: int, tmp_path: Path) -> None:
    """To the bit, and two groups of Gloo live in one process."""
    processes.do(sizes_of(size, item_bytes), compare_with_gloo, str(tmp_path / "store"))


def wait_in_vain(ranks: SharedRanks, join: Callable[[SharedRanks], object]) -> str:
    """Rank 0 waits for rank 1, which gives up."""
    if ranks.rank == 1:
        time.sleep(0.2)
        ranks.abort()
    else:
        join(ranks)
    with pytest.raises(RankLostError) as caught:
        ranks.end_step()
    return str(caught.value)


def _sum(ranks: SharedRanks) -> object:
    return ranks.sum(torch.zeros(3, WIDTH))


def _gather(ranks: SharedRanks) -> object:
    return ranks.gather(torch.zeros(3, len(part_of(ranks.rank, ranks.size, VOCAB))), VOCAB)


@pytest.mark.parametrize("join", [_sum, _gather])
def test_abort_ends_the_waits_of_all_ranks(processes: RankProcesses, join: Callable[[SharedRanks], object]) -> None:
    assert processes.do(sizes_of(2), wait_in_vain, join) == ["a rank of this model has ended"] * 2


def miss_a_sum(ranks: SharedRanks) -> str:
    ranks.begin_step(1)
    x = torch.zeros(3, WIDTH)
    ranks.sum(x)
    if ranks.rank == 0:
        ranks.sum(x)
    ranks.begin_step(2)
    for _ in range(3):
        ranks.sum(x)
    with pytest.raises(RankLostError) as caught:
        ranks.check()
    return str(caught.value)


def test_a_rank_that_misses_a_sum_is_found(processes: RankProcesses) -> None:
    assert processes.do(sizes_of(2), miss_a_sum) == ["the ranks of this model do not compute the same step"] * 2


LATE_S = 0.4


def be_late(ranks: SharedRanks, path: str) -> list[tuple[float, float]]:
    """Rank 1 comes late to each sum. Returns what each way of joining says of waits, and what the sum took in all."""
    gloo = GlooRanks(FileStore(path, ranks.size), "late", ranks.rank, ranks.size, 60.0)
    found = []
    for each in (ranks, gloo):
        each.begin_step(1)
        each.sum(torch.zeros(3, WIDTH))  # all are there
        time.sleep(_LEAST_S)  # before that nothing is said
        before, began = each.waited_s, time.monotonic()
        if ranks.rank == 1:
            time.sleep(LATE_S)
        each.sum(torch.zeros(3, WIDTH))
        found.append((each.waited_s - before, time.monotonic() - began))
        each.end_step()
    return found


def test_waits_are_those_for_a_rank_that_is_late(processes: RankProcesses, tmp_path: Path) -> None:
    first, late = processes.do(sizes_of(2), be_late, str(tmp_path / "late"))
    for (waited, took), (waited_of_late, took_of_late) in zip(first, late, strict=True):
        assert LATE_S / 2 < waited < took + LATE_S / 10
        assert waited_of_late < took_of_late - LATE_S * 0.9  # whatever else delays it, it has slept


def lose_gloo(ranks: SharedRanks, path: str) -> str:
    gloo = GlooRanks(FileStore(path, ranks.size), "lost", ranks.rank, ranks.size, 60.0)
    if ranks.rank == 1:
        time.sleep(0.2)
        gloo.abort()
    with pytest.raises(RankLostError) as caught:
        gloo.sum(torch.zeros(3, WIDTH))
    with pytest.raises(RankLostError):
        gloo.end_step()
    return str(caught.value)


def test_gloo_tells_that_a_rank_has_given_up(processes: RankProcesses, tmp_path: Path) -> None:
    found = processes.do(sizes_of(2), lose_gloo, str(tmp_path / "store"))
    assert all(words.startswith("a rank of this model has ended") for words in found)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, pytest.raises(ValueError, match="is no memory of ranks"):
        SharedRanks.join(file.fileno(), 0)


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    ranks = SharedRanks.create(sizes_of(2))
    with pytest.raises(AssertionError, match=f"{MAX_ROWS + 1}"):
        ranks.sum(torch.zeros(MAX_ROWS + 1, WIDTH))
