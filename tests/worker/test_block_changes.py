"""Changes of the prefix cache on their way to a gateway that reads slowly."""

import asyncio
import random

from kvtransfer.ids import GatewayId, WorkerId
from services.config import WorkerRole
from services.engine.blocks.prefix_cache import ROOT_NODE, CacheEvents
from services.protocol.block_hash import BlockHash
from services.protocol.messages import GatewayHello, WorkerHello
from services.worker.block_changes import BlockChanges
from services.worker.engine_thread import EngineThread
from services.worker.gateway_servicer import GatewayServicer, _Stream


def test_whoever_takes_all_messages_knows_what_is_cached():
    rng, changes = random.Random(1), BlockChanges()
    cached: set[BlockHash] = set()
    known: set[BlockHash] = set()
    sequence = 1
    for _ in range(1000):
        evicted = set(rng.sample(sorted(cached), rng.randint(0, min(3, len(cached)))))
        added = {BlockHash(rng.randrange(5000).to_bytes(16, "big")) for _ in range(4)} - (cached - evicted)
        cached = cached - evicted | added
        changes.note(added, evicted)
        while len(changes) and (rng.random() < 0.01 or len(changes) > 4000):
            events = changes.take()
            sequence += 1
            assert events.sequence == sequence
            assert len(events.added) + len(events.evicted) <= 1024
            known = known - set(events.evicted) | set(events.added)
    while len(changes):
        events = changes.take()
        known = known - set(events.evicted) | set(events.added)
    assert known == cached


async def test_many_changes_at_once_do_not_end_a_stream():
    """Of 140,000 blocks, while nobody reads; they were 4,375 messages in a queue for 2,048."""
    hello = WorkerHello(
        worker_id=WorkerId(1), role=WorkerRole.DECODE, fingerprint="x", kv_protocol=1, transports=(), block_size=1,
        num_blocks=1, max_model_len=1, max_num_seqs=1, vocab_size=1,
    )  # fmt: skip
    servicer = GatewayServicer(EngineThread.__new__(EngineThread), hello, lambda take_from: None, drain=_never_drains)
    ended: list[_Stream] = []
    stream = _Stream(GatewayHello(GatewayId(7), 0), ended.append)
    servicer._streams[stream.gateway] = stream
    events = CacheEvents()
    for node in range(1, 140_001):
        events.added(node, ROOT_NODE, node.to_bytes(4, "little"))
    servicer.block_log.append(events)
    while not servicer.block_log.idle:
        await asyncio.sleep(0)
    assert not ended
    assert len(stream.changes) == 140_000


async def _never_drains(timeout_s: float | None) -> tuple[bool, int]:
    raise AssertionError("nobody asks it to drain")
