"""The registry of workers: each renews a lease on its record, gateways read the records whose lease lasts.

It tells a gateway where to connect, and nothing else: whether a worker lives is its stream's to say. An id whose lease
ran out is dead, and its entries in the index are swept. Everything in here is about ids of publications
(publication.py), in hex, so that redis-cli shows them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import cast

import orjson
import structlog

from kvtransfer.ids import WorkerId
from services.config.hosts import split_address
from services.prefix_index.malformed import MalformedEntries
from services.prefix_index.publication import unpack_id
from services.prefix_index.redis_client import (
    DEAD,
    LEASES,
    RECORDS,
    SWEEPER,
    TREES,
    UNREACHABLE,
    Client,
    is_of_another_type,
)

LEASE_S = 10.0
RENEW_EVERY_S = 2.0
_SWEEP_LOCK_S = 60  # renewed on the way
_LONGEST_SWEEP_S = 2.0 * _SWEEP_LOCK_S  # a lock lasts longer where its owner died and the server's clock was set back
_SCAN_PAGE = 100  # trees
_SWEEP_PAUSE_S = 0.001  # after each tree
_NUMBERS = ("worker_id", "block_size", "num_blocks")  # fields of a record; all others are strings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The registry's entry of one worker."""

    address: str
    role: str
    worker_id: WorkerId
    model: str  # `model_digest`
    fingerprint: str
    block_size: int
    num_blocks: int

    def to_json(self) -> bytes:
        """The record as Redis keeps it."""
        values = asdict(self)
        values["incarnation"] = f"{values.pop('worker_id'):016x}"
        return orjson.dumps(values)

    @classmethod
    def from_json(cls, raw: bytes) -> "WorkerRecord":
        """A record, whatever further fields a newer version wrote. Raises ValueError, TypeError or KeyError."""
        values = orjson.loads(raw)
        values["worker_id"] = WorkerId(int(values["incarnation"], 16))
        for field in fields(cls):
            if not isinstance(values[field.name], int if field.name in _NUMBERS else str):
                raise TypeError(f"{field.name} is {values[field.name]!r}")
        split_address(values["address"])
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class Registry:
    """The registry's calls. Each raises one of redis_client.UNREACHABLE when there is no Redis to answer."""

    def __init__(
        self,
        client: Client,
        malformed: MalformedEntries | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._locked_since: float | None = None  # the sweep, by others, as far as this process knows
        self.malformed = malformed or MalformedEntries()
        self._unreadable: set[bytes] = set()  # in the last answer, of which that was said
        self._register = client.script("register")
        self._leave = client.script("leave")
        self._workers = client.script("workers")
        self._sweep = client.script("sweep")

    async def renew(self, id: bytes, record: WorkerRecord, *, confirmed: bool, retired: Iterable[bytes] = ()) -> bool:
        """Renews the lease of `id`, or begins it; the `retired` are dead from now on.

        False: the lease was `confirmed` before and is not there any more. Then `id` is dead, and stays so.
        """
        arguments: list[str | bytes | int] = [id.hex(), record.to_json(), int(LEASE_S * 1000)]
        arguments += [int(confirmed), *(other.hex() for other in retired)]
        return bool(await self._register([RECORDS, LEASES, DEAD], arguments))

    async def leave(self, ids: Iterable[bytes]) -> None:
        """A worker is about to end: all that it published is dead."""
        await self._leave([RECORDS, LEASES, DEAD], [id.hex() for id in ids])

    async def workers(self) -> list[WorkerRecord]:
        """All whose lease lasts; records that this version cannot read are left out."""
        found, unreadable = [], set[bytes]()
        for raw in await self._workers([RECORDS, LEASES]):
            try:
                found.append(WorkerRecord.from_json(raw))
            except (ValueError, TypeError, KeyError) as error:
                if raw not in self._unreadable:
                    log.warning("a record of the registry is not readable", reason=repr(error))
                unreadable.add(raw)
        self._unreadable = unreadable
        return found

    async def sweep(self) -> int:
        """Takes the entries of dead publications out, unless another worker is at it; returns how many were dead."""
        redis, within_limit = self._client.redis, self._client.within_limit
        dead = cast("set[bytes]", await within_limit(redis.smembers(DEAD)))  # this client decodes nothing
        if not dead:
            self._locked_since = None
        if not dead or not await self._locked():
            return 0
        packed = b"".join(filter(None, map(self._packed, dead)))
        trees = aiter(redis.scan_iter(match=TREES, count=_SCAN_PAGE))
        swept = 0
        while (tree := await within_limit(anext(trees, None))) is not None:
            await self._sweep_tree(tree, packed)
            swept += 1
            if swept % _SCAN_PAGE == 0:
                await within_limit(redis.expire(SWEEPER, _SWEEP_LOCK_S))
            await asyncio.sleep(_SWEEP_PAUSE_S)  # nobody waits for this
        await within_limit(redis.srem(DEAD, *dead))
        await within_limit(redis.delete(SWEEPER))
        log.info("swept the prefix index", dead=len(dead), trees=swept)
        return len(dead)

    async def _locked(self) -> bool:
        """Keeps other workers from sweeping. False: one is at it. Two at a time would do no harm."""
        now = self._clock()
        overdue = self._locked_since is not None and now - self._locked_since > _LONGEST_SWEEP_S
        call = self._client.redis.set(SWEEPER, "", nx=not overdue, ex=_SWEEP_LOCK_S)
        if await self._client.within_limit(call):
            self._locked_since = None
            return True
        if self._locked_since is None:
            self._locked_since = now
        return False

    async def _sweep_tree(self, tree: str, packed: bytes) -> None:
        cursor = b"0"
        try:
            while (cursor := await self._sweep([tree], [cursor, packed])) != b"0":
                pass
        except UNREACHABLE as error:
            if not is_of_another_type(error):
                raise
            self.malformed.skipped("tree", tree, str(error))

    def _packed(self, dead: bytes) -> bytes | None:
        """The id of a publication of which Redis has the hex; None for what is none, which the sweep ends too."""
        try:
            unpack_id(id := bytes.fromhex(dead.decode()))
        except ValueError as error:
            self.malformed.skipped("dead publication", dead, str(error))
            return None
        return id
