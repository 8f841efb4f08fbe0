"""Block events: changes of a worker's prefix cache."""

from collections.abc import Iterable

from protos import worker_pb2
from services.protocol.block_hash import HASH_BYTES, BlockHash
from services.protocol.messages import BlockEvents
from services.protocol.wire.errors import WireError


def pack_block_events(events: BlockEvents) -> worker_pb2.BlockEvents:
    """Packs changes of a prefix cache."""
    return worker_pb2.BlockEvents(
        sequence=events.sequence,
        snapshot=events.snapshot,
        added=b"".join(events.added),
        evicted=b"".join(events.evicted),
    )


def parse_block_events(packed: worker_pb2.BlockEvents) -> BlockEvents:
    """Parses changes of a prefix cache. Raises WireError."""
    added, evicted = _parse_hashes(packed.added), _parse_hashes(packed.evicted)
    return BlockEvents(packed.sequence, packed.snapshot, added, evicted)


def _parse_hashes(raw: bytes) -> list[BlockHash]:
    if len(raw) % HASH_BYTES:
        raise WireError(f"{len(raw)} bytes of block hashes")
    starts: Iterable[int] = range(0, len(raw), HASH_BYTES)
    return [BlockHash(raw[at : at + HASH_BYTES]) for at in starts]
