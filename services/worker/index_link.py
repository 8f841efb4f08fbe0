"""A worker's part in Redis: its record in the registry, and what it caches in the prefix index.

Redis may come and go. Nothing fails with it, and nobody waits for it.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from kvtransfer.ids import WorkerId
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import UNREACHABLE, connect
from services.prefix_index.registry import RENEW_EVERY_S, Registry, WorkerRecord
from services.process.supervised import supervised
from services.protocol.block_hash import BlockHash

_TIMEOUT_S = 1.0
_SWEEP_EVERY_S = 30.0

log = structlog.get_logger()


class IndexLink:
    """Lives on the event loop. `register` once, then `run` until cancelled."""

    def __init__(self, url: str, worker_id: WorkerId, record: WorkerRecord) -> None:
        self._client = connect(url, _TIMEOUT_S)
        self._registry = Registry(self._client)
        self._publisher = IndexPublisher(self._client, worker_id)
        self._record = record
        self._reachable = True

    def blocks_changed(self, added: Mapping[BlockHash, BlockHash], evicted: Mapping[BlockHash, BlockHash]) -> None:
        """Takes note of a change, as BlockLog tells it, to publish it soon."""
        for first, gone in _by_tree(evicted).items():
            self._publisher.change(first, [], gone)
        for first, come in _by_tree(added).items():
            self._publisher.change(first, come, [])

    @property
    def idle(self) -> bool:
        """True when everything is published."""
        return self._publisher.idle

    async def register(self) -> None:
        """Renews the lease, or begins it. A server that does not answer is logged, once."""
        try:
            await self._renew()
        except UNREACHABLE as error:
            if self._reachable:
                log.warning("the registry does not take this worker's word; it will be told again", reason=str(error))
            self._reachable = False
        else:
            if not self._reachable:
                log.info("the registry knows this worker again")
            self._reachable = True

    async def run(self) -> None:
        """Keeps the lease, publishes, and sweeps behind workers that died. Leaves registry and index at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervised("the lease in the registry", self._keep_lease))
                group.create_task(supervised("the publisher of cached blocks", self._publisher.run))
                group.create_task(supervised("the sweep of the prefix index", self._sweep))
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Takes the worker out of registry and index, if the server answers, and closes the connection."""
        with suppress(*UNREACHABLE):
            await self._registry.leave([self._publisher.id, *self._publisher.retired])
        await self._client.aclose()

    async def _keep_lease(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_EVERY_S):
                    await self._publisher.renamed.wait()
            self._publisher.renamed.clear()
            await self.register()

    async def _renew(self) -> None:
        id, retired, confirmed = self._publisher.id, self._publisher.retired, self._publisher.confirmed
        if await self._registry.renew(id, self._record, confirmed=confirmed, retired=retired):
            self._publisher.confirm(id, retired)
        else:  # a server that lost its data, or a lease that ran out and was swept
            log.warning("the registry had lost this worker; publishing everything again")
            if id == self._publisher.id:
                self._publisher.begin_anew()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            with suppress(*UNREACHABLE):  # the lease's task says so
                await self._registry.sweep()


def _by_tree(blocks: Mapping[BlockHash, BlockHash]) -> dict[BlockHash, list[BlockHash]]:
    trees: dict[BlockHash, list[BlockHash]] = {}
    for hash, first in blocks.items():
        trees.setdefault(first, []).append(hash)
    return trees
