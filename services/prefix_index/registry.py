"""Which workers there are: each renews a lease on its record, gateways read the records of those whose lease lasts.

It tells a gateway where to connect, and nothing else: whether a worker lives is its stream's to say. An id whose lease
ran out is dead, and its entries in the index are swept. Everything in here is about ids of publications
(publication.py), in hex, so that redis-cli shows them.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

import orjson
import structlog

from services.prefix_index.redis_client import DEAD, LEASES, RECORDS, SWEEPER, TREES, Client

LEASE_S = 10.0
RENEW_EVERY_S = 2.0
_SWEEP_S = 60  # then another may begin

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What the registry tells of one worker."""

    address: str
    role: str
    incarnation: str  # hex
    fingerprint: str
    block_size: int
    num_blocks: int


class Registry:
    """The registry's calls. Each raises one of redis_client.UNREACHABLE when there is no Redis to answer."""

    def __init__(self, client: Client) -> None:
        self._redis = client.redis
        self._register = client.script("register")
        self._leave = client.script("leave")
        self._workers = client.script("workers")
        self._sweep = client.script("sweep")

    async def renew(self, id: bytes, record: WorkerRecord, retired: Iterable[bytes] = ()) -> bool:
        """Renews the lease of `id`; the `retired` are dead from now on. False: nothing was known of `id`."""
        arguments: list[str | bytes | int] = [id.hex(), orjson.dumps(asdict(record)), int(LEASE_S * 1000)]
        arguments += [other.hex() for other in retired]
        return bool(await self._register([RECORDS, LEASES, DEAD], arguments))

    async def leave(self, ids: Iterable[bytes]) -> None:
        """A worker is about to end: all that it published is dead."""
        await self._leave([RECORDS, LEASES, DEAD], [id.hex() for id in ids])

    async def workers(self) -> list[WorkerRecord]:
        """All whose lease lasts; records of another version that this one cannot read are left out."""
        return [record for raw in await self._workers([RECORDS, LEASES]) if (record := _parse(raw)) is not None]

    async def sweep(self) -> int:
        """Takes the entries of dead publications out, unless another worker is at it; returns how many were dead."""
        async with asyncio.timeout(_SWEEP_S):
            dead = cast("set[bytes]", await self._redis.smembers(DEAD))  # this client decodes nothing
            if not dead or not await self._redis.set(SWEEPER, "", nx=True, ex=_SWEEP_S):
                return 0
            packed = b"".join(bytes.fromhex(id.decode()) for id in dead)
            async for tree in self._redis.scan_iter(match=TREES, count=1000):
                cursor = b"0"
                while (cursor := await self._sweep([tree], [cursor, packed])) != b"0":
                    pass
            await self._redis.srem(DEAD, *dead)
            await self._redis.delete(SWEEPER)
        log.info("swept the prefix index", dead=len(dead))
        return len(dead)


def _parse(raw: bytes) -> WorkerRecord | None:
    try:
        return WorkerRecord(**orjson.loads(raw))
    except (orjson.JSONDecodeError, TypeError) as error:
        log.warning("a record of the registry is not readable", reason=str(error))
        return None
