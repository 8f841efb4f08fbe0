"""Nodes of sequences in the prefix cache: a prompt's at admission, pending; generated blocks as they fill.

A slot's blocks   [0 ─── ready ───┬─── pending ───┬─── no nodes ───]
                             num_ready       num_entered
"""

import numpy as np

from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.deferred_frees import DeferredFrees
from services.engine.blocks.prefix_cache import NO_BLOCK, NO_MATCH, Match
from services.engine.sequences.batch_state import MEDIA, BatchState
from services.engine.sequences.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.contents import NO_MARKS


class CacheNodes:
    """Looks requests up in the prefix cache, and enters, readies and removes the nodes of slots."""

    def __init__(self, batch: BatchState, pool: BlockPool, frees: DeferredFrees) -> None:
        self._batch = batch
        self._pool = pool
        self._cache = pool.cache
        self._frees = frees

    def match(self, request: Request) -> Match:
        """Finds the cached prefix of a request; a prompt of which all is needed has none."""
        match = self.known_match(request)
        if match is None:
            capsule = request.capsule
            whole = request.needs_whole_prompt
            position = len(capsule.token_ids) if request.kind is Kind.CONSUME else None
            match = NO_MATCH if whole else self._cache.match(capsule.contents, capsule.namespace, position)
            request.match, request.matched_at = match, self._cache.version
        return match

    def known_match(self, request: Request) -> Match | None:
        """The result of the last look-up of a request; None where the cache has changed since."""
        return request.match_at(self._cache.version)

    def enter_prompt(self, capsule: Capsule, blocks: np.ndarray, num_cached: int) -> int:
        """Enters the full blocks of a capsule's tokens that follow the cached ones, as pending nodes.

        Returns how many leading blocks have nodes. The first twin ends them: the last block, which no look-up takes as
        a hit, or any block of a prompt of which all is needed.
        """
        size, token_ids = self._batch.block_size, capsule.token_ids
        end = min(len(token_ids) // size, len(blocks))
        chain: list[int] = blocks[num_cached:end].tolist()
        parents = [int(blocks[num_cached - 1]) if num_cached else NO_BLOCK, *chain][:-1]
        content = token_ids[num_cached * size : end * size].reshape(-1, size)
        marks = capsule.contents.marks(size)
        if marks:
            marks = {index - num_cached: mark for index, mark in marks.items() if index >= num_cached}
        twins = self._cache.insert(parents, chain, content, pending=True, namespace=capsule.namespace, marks=marks)
        return num_cached + min(twins, default=len(chain))

    def make_ready(self, slot: int, num_blocks: int) -> None:
        """Makes the nodes of a slot's first num_blocks blocks hits: these blocks are complete."""
        batch = self._batch
        end = min(num_blocks, int(batch.num_entered[slot]))
        for block in batch.block_table[slot, batch.num_ready[slot] : end].tolist():
            if self._cache.is_pending(block):  # else it was withdrawn with one above it
                self._cache.make_ready(block)
        batch.num_ready[slot] = max(end, int(batch.num_ready[slot]))

    def enter_filled(self, slots: np.ndarray) -> None:
        """Enters the blocks that these decoding slots have filled, for other requests to find."""
        batch = self._batch
        num_full, entered = batch.done[slots] // batch.block_size, batch.num_entered[slots]
        filled = num_full > entered
        if not filled.any():
            return
        slots, num_full, entered = slots[filled], num_full[filled], entered[filled]
        usual = (num_full == entered + 1) & (batch.num_ready[slots] == entered) & (entered > 0)
        if batch.num_with_media:
            usual &= batch.features[slots] & MEDIA == 0
        left = self._enter_one_each(slots[usual], entered[usual])
        for slot in (*left, *slots[~usual].tolist()):
            self._enter_filled(slot)

    def withdraw(self, slot: int) -> None:
        """Takes all blocks of a slot out of the cache, those that it found there or freed too, and all that lies below
        them; nothing of the slot is entered any more.
        """
        batch, cache = self._batch, self._cache
        cached = [block for block in batch.blocks(slot) if cache.contains(block)]
        if cached:
            self._pool.evict([cached[0], *cache.ancestors(cached[0])][-1])
        batch.done[slot] = 0

    def leave(self, slot: int) -> None:
        """Enters what a slot that ends has filled, and removes its pending nodes, which nobody would make ready."""
        self._enter_filled(slot)
        batch, cache = self._batch, self._cache
        unready = batch.table(slot)[max(0, int(batch.num_ready[slot]) - int(batch.num_freed[slot])) :]
        for block in unready[::-1].tolist():
            if cache.is_pending(block):
                cache.remove(block)

    def _enter_one_each(self, slots: np.ndarray, at: np.ndarray) -> list[int]:
        """Enters block at[i] of slot i, whose parent is ready or was evicted; returns slots where there is a twin.

        The blocks are not below the root and have no marks, so that they need neither namespaces nor these.
        """
        batch, size = self._batch, self._batch.block_size
        parents, blocks = batch.block_table[slots, at - 1], batch.block_table[slots, at]
        tokens = batch.tokens[slots[:, None], at[:, None] * size + np.arange(size)]
        twins = list(self._cache.insert(parents.tolist(), blocks.tolist(), tokens, pending=False))
        entered = np.delete(np.arange(len(slots)), twins) if twins else slice(None)
        batch.num_entered[slots[entered]] = batch.num_ready[slots[entered]] = at[entered] + 1
        left: list[int] = slots[twins].tolist()
        return left

    def _enter_filled(self, slot: int) -> None:
        """Enters full blocks that have no nodes; a ready twin takes a block's place in the table.

        So sequences that generate the same text share its blocks, and a duplicate is free at once. A pending twin may
        become ready or be removed: the block is entered at a later step then, as one whose twin lacks a part that
        others share. Below a parent that was evicted there is nothing to enter.
        """
        batch, size = self._batch, self._batch.block_size
        table, entered = batch.block_table[slot], int(batch.num_entered[slot])
        capsule = batch.request(slot).capsule
        namespace, marks = capsule.namespace, capsule.contents.marks(size)
        if batch.num_ready[slot] < entered:
            return
        for index in range(entered, min(int(batch.done[slot]) // size, int(batch.num_blocks[slot]))):
            block, parent = int(table[index]), int(table[index - 1]) if index else NO_BLOCK
            tokens = batch.tokens[slot, None, index * size : (index + 1) * size]
            mark = {0: marks[index]} if index in marks else NO_MARKS
            twins = self._cache.insert([parent], [block], tokens, pending=False, namespace=namespace, marks=mark)
            twin = twins.get(0)
            if twin is not None:
                if self._cache.is_pending(twin):
                    return
                freed = self._pool.replace(block, twin, batch.unseen[slot] - index)
                if freed is None:
                    return
                table[index] = twin
                self._frees.free(freed)
            batch.num_entered[slot] = batch.num_ready[slot] = index + 1
