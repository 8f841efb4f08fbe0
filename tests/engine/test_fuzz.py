"""The fuzz of the engine: some of its seeds, its oracle, and bugs that are planted for it to find."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvtransfer.ids import AttemptId
from services.engine.blocks.deferred_frees import DeferredFrees
from services.engine.blocks.prefix_cache import PrefixCache
from services.engine.blocks.sliced_cache import SlicedCache
from services.engine.blocks.sliced_parts import SlicedBlocks
from services.engine.blocks.sliced_pool import SlicedPool
from services.engine.sequences.block_tables import BlockTables
from services.engine.sequences.queued_groups import QueuedGroups
from services.protocol.contents import Contents, Namespace
from tests.engine.fuzz import Oracle, Traffic
from tests.engine.harness import reference
from tests.seeds import first_of

PER_TEST = 50
TO_FIND = 60  # seeds


def run_seeds(first: int, count: int, *, in_slices: bool = False) -> None:
    for seed in range(first, first + count):
        try:
            Traffic(seed, in_slices).run()
        except Exception as error:
            option = " --slices" if in_slices else ""
            raise AssertionError(f"python -m tests.engine.fuzz --first {seed} --seeds 1{option}") from error


@pytest.mark.few(1)
@pytest.mark.parametrize("first", first_of(2, range(0, 400, PER_TEST)))
def test_blocks_states_and_tokens_are_right_whatever_happens(first: int):
    run_seeds(first, PER_TEST)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 400, 10))
def test_layers_with_windows_of_their_own(first: int):
    run_seeds(first, 10, in_slices=True)


def test_the_seeds_cover_what_can_happen():
    seen = [Traffic(seed) for seed in range(40)]
    for traffic in seen:
        traffic.run()
    assert {traffic.produces for traffic in seen} == {True, False}
    assert sum(len(traffic.ended) for traffic in seen) > 100
    assert sum(len(traffic.driven.finish) for traffic in seen) > 400
    assert sum(len(traffic.driven.announced) for traffic in seen) > 50
    assert sum(traffic.drafts.num_planned for traffic in seen) > 200


def test_the_oracle_says_what_an_engine_says():
    rng = random.Random(5)
    for length in (1, 4, 7, 20):
        prompt, seed = [rng.randrange(1000) for _ in range(length)], rng.randrange(2**64)
        said = Oracle(1000, (None,), 256).says(prompt, 12, seed, ())
        assert said == reference(prompt, 12, seed=seed, temperature=1.0)


def forget_queued_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before aborts of single choices reached groups that are queued."""

    def ends_with(groups: QueuedGroups, id: AttemptId) -> AttemptId:
        return id

    def remove(groups: QueuedGroups, id: AttemptId) -> None:
        pass

    monkeypatch.setattr(QueuedGroups, "ends_with", ends_with)
    monkeypatch.setattr(QueuedGroups, "remove", remove)


def free_without_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks to which an open read still writes are free at once."""
    free = BlockTables.free

    def freed(tables: BlockTables, slot: int, quarantined: frozenset[int] = frozenset()) -> None:
        free(tables, slot)

    monkeypatch.setattr(BlockTables, "free", freed)
    monkeypatch.setattr(BlockTables, "free_quarantined", lambda tables, blocks: None)


def find_pending_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes blocks for hits that are still being computed or read."""
    match = PrefixCache.match

    def matched(cache: PrefixCache, contents: Contents, namespace: Namespace, position: int | None = None) -> object:
        pending, cache._pending = cache._pending, [False] * len(cache._pending)
        try:
            return match(cache, contents, namespace, position)
        finally:
            cache._pending = pending

    monkeypatch.setattr(PrefixCache, "match", matched)


def free_under_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are free while a step that was launched before still uses them."""

    def free(frees: DeferredFrees, blocks: np.ndarray, *, touches_above: bool = False) -> None:
        frees._free(blocks, touches_above)

    monkeypatch.setattr(DeferredFrees, "free", free)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "plant", [free_under_a_step, forget_queued_branches, free_without_quarantine, find_pending_blocks]
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(0, TO_FIND)


def hit_without_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes nodes for hits that have lost what the next token sees."""
    monkeypatch.setattr(SlicedCache, "match", PrefixCache.match)


def pass_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are freed one token before the window has passed them."""
    unseen = SlicedBlocks.unseen
    monkeypatch.setattr(SlicedBlocks, "unseen", lambda parts, positions: unseen(parts, np.asarray(positions) + 1))


def share_what_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached block takes over slices that other sequences have in their tables, too."""
    replace = SlicedPool.replace

    def replaced(pool: SlicedPool, block: int, twin: int, unseen: np.ndarray) -> np.ndarray | None:
        shared = pool._references[block :: pool.parts.num_ids] > 1
        pool._references[block :: pool.parts.num_ids][shared] = 1
        return replace(pool, block, twin, unseen)

    monkeypatch.setattr(SlicedPool, "replace", replaced)


@pytest.mark.few(1)
@pytest.mark.parametrize("plant", [hit_without_slices, pass_too_early, share_what_is_replaced])
def test_a_bug_of_slices_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(0, TO_FIND, in_slices=True)
