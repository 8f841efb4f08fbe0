"""The dispatch side of the gateway: has workers generate tokens for the API side.

Joins the links to the workers, the ledger and the placement. A request is driven by the task that reads it: its reader
places it, waits for news, and places it again after an attempt failed. No other task exists for a request or a token.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import structlog

from kvtransfer.ids import GatewayId, WorkerId
from services.config import WorkerRole
from services.gateway.api.generation import GenerationRequest, Overloaded, Refusal, Stopping, Unavailable, Unsupported
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.descriptions import describe_entry, describe_worker
from services.gateway.dispatch.fleet import Fleet, LiveWorker
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.ledger.ledger import Ledger, LedgerObserver
from services.gateway.dispatch.links import LinkRefused, WorkerLink, of_another_model
from services.gateway.dispatch.lives import WorkerLives
from services.gateway.dispatch.overseer import Overseer, Status
from services.gateway.dispatch.placement import Placement, PlacementObserver
from services.gateway.dispatch.reader import Reader, Relays
from services.gateway.dispatch.router import NoPlan, Policy
from services.prefix_index.base import PrefixIndex
from services.protocol.capabilities import EMBEDDINGS, in_words
from services.protocol.frames import Failure, Frame, Load
from services.protocol.messages import BlockEvents, Command, GatewayHello, WorkerHello, WorkerNews
from services.protocol.sampling import MAX_ALTERNATIVES
from services.tls.grpc_ends import Channels

# When a machine stalls, all streams break at once. Waiting requests give the second worker of a pair this long to
# return after the first, or all of them would be served without a handoff.
_REUNION_S = 0.2

# Logprobs of alternatives, in requests for more than FEW_ALTERNATIVES of a token. They have 8 bytes each in frames, of
# which a message takes 64 MiB, and some 80 in an answer's JSON.
MAX_ALTERNATIVES_IN_FLIGHT = 2 * MAX_ALTERNATIVES

log = structlog.get_logger()


class DispatchObserver(LedgerObserver, PlacementObserver, Protocol):
    """Counts what happens on the dispatch side. `worker` is an address."""

    def worker_up(self, worker: str, hello: WorkerHello) -> None:
        """A worker's stream began."""

    def worker_load(self, worker: str, role: WorkerRole, load: Load) -> None:
        """A live worker reported its load."""

    def worker_gone(self, worker: str, role: WorkerRole) -> None:
        """A worker's stream ended."""

    def kv_bytes_moved(self, count: int) -> None:
        """Counts KV bytes that a worker read from another one."""


@dataclass(frozen=True, slots=True)
class WorkerAccess:
    """The way in which a gateway connects to workers, and its terms."""

    model: str = ""  # workers that name another model are refused; empty: no worker is
    # Where no worker that could run a request is connected, the request waits so long, unless no worker is known.
    no_worker_wait_s: float = 0.0
    channels: Channels = field(default_factory=Channels)
    role: WorkerRole = WorkerRole.DECODE  # of the workers without which no request can be served


class Dispatcher:
    """A `Generator` over the workers at given addresses. Works while `run` runs."""

    def __init__(
        self,
        addresses: Iterable[str],
        policy: Policy,
        max_waiting: int,
        index: PrefixIndex,
        observer: DispatchObserver,
        access: WorkerAccess | None = None,
    ) -> None:
        """`addresses`: of all workers; none: `set_addresses` tells them. access: None: that of the defaults."""
        self._access = access = access or WorkerAccess()
        self._worker_came = asyncio.Event()  # replaced each time
        self._max_waiting = max_waiting
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._links = {address: WorkerLink(address, self, access.channels) for address in addresses}
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}  # of the links, while `run` runs
        self._fleet = Fleet(index)
        self._relays = Relays()
        self._gateway_id = GatewayId(secrets.randbits(64))
        self._costs = CostModel()
        self._ledger = Ledger(self._send, self._loop.time, observer, self._costs)
        self._placement = Placement(self._ledger, self._fleet, policy, self._costs, observer, self._begin_again)
        self._tried = False  # every address that was known at the start
        self._told = len(self._links) > 0  # of all workers that there are
        self._lives = WorkerLives()
        hits = self._placement.prefix_hits
        self.overseen = Overseer(self._fleet, self._links, self._lives, self._ledger, hits, self._status)
        self._bytes_moved: dict[str, tuple[WorkerId, int]] = {}  # by address: who reported last, and how many
        self._alternatives = 0  # that requests in flight may get, see MAX_ALTERNATIVES_IN_FLIGHT
        self._draining = False
        self._ended = False
        self.max_model_len: int | None = None

    async def run(self) -> None:
        """Keeps the streams to all workers up, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for link in self._links.values():
                self._start_link(link)
            await asyncio.Event().wait()  # links come and go

    def set_addresses(self, addresses: Iterable[str], refused: Mapping[str, str] | None = None) -> None:
        """Connects to addresses that are new, and closes links to addresses that are gone, while `run` runs.

        A link with a connected worker stays: its stream tells whether the worker lives, not the list.
        refused: further workers, which do not fit, with the reason of each by its address.
        """
        self._told = True
        self._lives.note_refused(refused or {}, time.time())
        wanted = set(addresses)
        for address in wanted - self._links.keys():
            self._links[address] = link = WorkerLink(address, self, self._access.channels)
            self._start_link(link)
        for address in self._links.keys() - wanted:
            if not self._links[address].connected:
                del self._links[address]
                self._tasks.pop(address).cancel()

    def _start_link(self, link: WorkerLink) -> None:
        self._tasks[link.address] = self._group.create_task(link.run())

    # For the API side

    def ready(self) -> bool:
        """See Generator. False until every address was tried once, or the first requests would find no pair."""
        links = self._links.values()
        self._tried = self._tried or (len(links) > 0 and all(link.tried for link in links))
        return self._fleet.has(self._access.role) and self._tried and not self._draining

    def drain(self, after_s: float) -> None:
        """Is not ready any more, and ends all requests that are still in flight after so many seconds with an error."""
        self._draining = True
        self._loop.call_later(after_s, self._end_all)

    def _end_all(self) -> None:
        self._ended = True
        for entry in self._ledger:
            self._ledger.close(entry, Stopping("the gateway ends"))

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Reader]:
        """See Generator."""
        if self._ended:
            raise Stopping("the gateway ends")
        if len(self._ledger) + len(request.capsules) > self._max_waiting:
            raise Overloaded(f"{len(self._ledger)} of at most {self._max_waiting} choices are in flight already")
        alternatives = sum(capsule.many_alternatives for capsule in request.capsules)
        if self._alternatives + alternatives > MAX_ALTERNATIVES_IN_FLIGHT:
            what = f"{self._alternatives} of at most {MAX_ALTERNATIVES_IN_FLIGHT} logprobs of alternatives"
            raise Overloaded(f"{what} are in flight already", refusal=Refusal.LOGPROBS)
        reader = Reader(self._placement.place, self._ledger.close, self._relays)
        entries = [self._ledger.open(request, choice, reader) for choice in range(len(request.capsules))]
        timer = self._loop.call_at(entries[0].deadline, self._expire, entries)
        self._alternatives += alternatives
        try:
            for first in range(0, len(entries), request.num_choices):
                if first:
                    await asyncio.sleep(0)  # a look-up in memory never waits, and there may be many prompts
                await self._place_first(entries[first : first + request.num_choices])
            for entry in entries:
                entry.check()
            reader.start(entries)
            yield reader
        finally:
            timer.cancel()
            self._alternatives -= alternatives
            for entry in entries:
                self._ledger.close(entry)
            reader.stop()

    async def _place_first(self, entries: Sequence[LedgerEntry]) -> None:
        """Starts the first attempt. Raises Unavailable where no worker that could run it comes in time, and Unsupported
        where none is to come.
        """
        until = self._loop.time() + self._access.no_worker_wait_s
        while await self._placement.place(entries) is NoPlan.NO_WORKER:
            self._check_known(entries[0].request.capsules[0].needs)
            await self._next_worker(until)

    async def until_model_len_known(self) -> int:
        """See Generator."""
        until = self._loop.time() + self._access.no_worker_wait_s
        while self.max_model_len is None:
            await self._next_worker(until)
        return self.max_model_len

    async def until_embedding_size_known(self) -> int:
        """See Generator."""
        until = self._loop.time() + self._access.no_worker_wait_s
        while not (size := self._fleet.embedding_size()):
            self._check_known(frozenset({EMBEDDINGS}))
            await self._next_worker(until)
        return size

    def _check_known(self, needs: frozenset[str]) -> None:
        """Raises Unsupported for what no worker has ever known, once all workers have said what they know.

        While a worker is not connected, or none of the role that would do the work, the one to come may know it.
        """
        unknown = needs - self._fleet.ever_known
        role = WorkerRole.PREFILL if EMBEDDINGS in needs else WorkerRole.DECODE
        heard_all = all(link.connected or link.refused for link in self._links.values())
        if unknown and heard_all and self._fleet.has(role):
            raise Unsupported(f"no worker knows {', '.join(sorted(unknown))}", asked=in_words(unknown))

    async def _next_worker(self, until: float) -> None:
        """Returns when a worker has connected or has news.

        Raises Unavailable at `until`, or at once where no worker is known.
        """
        came = self._worker_came
        try:
            async with asyncio.timeout_at(until if self._links or not self._told else 0.0):
                await came.wait()
        except TimeoutError:
            raise Unavailable("no worker that can run the request is connected") from None

    def _expire(self, entries: Sequence[LedgerEntry]) -> None:
        for entry in entries:
            self._ledger.on_deadline(entry)

    # For the links

    def gateway_hello(self) -> GatewayHello:
        """See LinkListener."""
        return GatewayHello(self._gateway_id, self._ledger.highest_handle, self._fleet.index.wants_block_events)

    def worker_up(self, link: WorkerLink, hello: WorkerHello) -> None:
        """See LinkListener."""
        worker = hello.worker_id
        if self._fleet.get(worker) is not None:
            raise LinkRefused("the same worker is connected under another address")
        if hello.model and self._access.model and hello.model != self._access.model:
            raise LinkRefused(of_another_model(hello.model, self._access.model))
        load = Load(available_blocks=hello.num_blocks)
        self._fleet.add(live := LiveWorker(worker, link, hello, load, self._loop.time()))
        for other in self._fleet.cut_off_from(live):
            has, others = ", ".join(hello.transports), ", ".join(other.hello.transports)
            reason = f"{link.address} has {has}, {other.link.address} has {others}: they cannot hand over to each other"
            log.warning("two workers never pair", reason=reason)
        self._ledger.on_return(worker)
        self._lives.note_up(link.address, worker, time.time())
        self._observer.worker_up(link.address, hello)
        self._observer.worker_load(link.address, hello.role, load)
        self.max_model_len = self._fleet.max_model_len()
        others_missing = any(not other.connected for other in self._links.values() if other is not link)
        self._loop.call_later(_REUNION_S if others_missing else 0, self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._worker_came.set()
        self._worker_came = asyncio.Event()
        waiting = [entry for entry in self._ledger if entry.attempt is None]
        for entry in sorted(waiting, key=_priority):
            entry.wake()

    def worker_sent(self, worker: WorkerId, message: Frame | BlockEvents | WorkerNews) -> None:
        """See LinkListener."""
        if (live := self._fleet.get(worker)) is None:
            return
        live.heard_at = self._loop.time()
        if not isinstance(message, Frame):
            self._note_changes(live, message)
            return
        self._note_step(worker, message)
        if message.timings:
            self._ledger.on_timings(worker, message.timings)
        self._ledger.on_rows(worker, message.rows())
        if message.embeddings is not None:
            self._ledger.on_embeddings(worker, message.embeddings)
        for failure in message.failures:
            self._on_failure(worker, failure)
        if message.load is not None:
            self._note_load(worker, message.load)

    def _note_changes(self, live: LiveWorker, message: BlockEvents | WorkerNews) -> None:
        if isinstance(message, BlockEvents):
            self._fleet.index.apply(live.id, message)
            return
        self._fleet.change(live, message)
        log.info("a worker has news", address=live.link.address, knows=sorted(message.knows))
        self._wake_waiting()

    def worker_down(self, link: WorkerLink, worker: WorkerId) -> None:
        """See LinkListener."""
        live = self._fleet.get(worker)
        if live is None or live.link is not link:
            return
        self._fleet.remove(worker, self._loop.time())
        self._costs.remove_worker(worker)
        self._ledger.pairs.remove_worker(worker)
        self.max_model_len = self._fleet.max_model_len() or self.max_model_len
        self._ledger.on_lost(worker)
        self._lives.note_gone(link.address, describe_worker(live), time.time())
        self._observer.worker_gone(link.address, live.hello.role)  # at last: what it may raise keeps nobody waiting

    def link_ended(self, link: WorkerLink) -> None:
        """See LinkListener."""
        self._lives.note_why(link.address, link.why_not)

    # For people

    def refused(self) -> dict[str, str]:
        """The workers that do not fit this gateway: the reason of each, by its address."""
        links = {link.address: link.why_not for link in self._links.values() if link.refused and not link.connected}
        return {**self._lives.refused(), **links}

    def describe(self) -> dict[str, object]:
        """The ledger and the live workers, as plain values."""
        now = self._loop.time()
        return {
            "gateway": f"{self._gateway_id:016x}",
            "rows": [describe_entry(entry, now) for entry in self._ledger],
            "workers": [describe_worker(worker) for worker in self._fleet],
            "not_connected": [
                {"address": link.address, "why": link.why_not} for link in self._links.values() if not link.connected
            ],
            "refused": [{"address": address, "why": why} for address, why in self._lives.refused().items()],
            "learned": asdict(self._costs.figures()),
        }

    def _status(self) -> Status:
        return Status(f"{self._gateway_id:016x}", self.ready(), self._draining)

    def _begin_again(self) -> None:
        """Goes on under a new gateway id, when all handles are used up: new streams know none of the old handles.

        Requests in flight continue from their capsules, as after the loss of every worker.
        """
        self._gateway_id = GatewayId(secrets.randbits(64))
        for worker in list(self._fleet):
            worker.link.reset("the gateway takes a new gateway id")
            self.worker_down(worker.link, worker.id)
        self._ledger.highest_handle = 0

    def _send(self, worker: WorkerId, command: Command) -> None:
        live = self._fleet.get(worker)
        if live is not None:
            live.link.send(command)

    def _on_failure(self, worker: WorkerId, failure: Failure) -> None:
        if not (entries := self._ledger.find(failure.handle)):
            return
        log.info(
            "attempt failed",
            request_id=entries[0].request.request_id,
            handle=failure.handle,
            worker=f"{worker:016x}",
            code=failure.code.name,
            detail=failure.detail,
        )
        self._ledger.on_failure(worker, failure)

    def _note_step(self, id: WorkerId, frame: Frame) -> None:
        """Tells the cost model of a decode worker's step, which ends with a frame."""
        worker = self._fleet.get(id)
        if worker is None or worker.hello.role is not WorkerRole.DECODE or not len(frame.handles):
            return
        waiting = worker.load.waiting > 0
        count = int(np.count_nonzero(frame.finish)) if waiting else 0
        self._costs.note_finished(id, count, self._loop.time(), others_wait=waiting)
        queued_tokens = self._ledger.workload.queued_tokens

        def has_prompts(some: LiveWorker) -> bool:
            return queued_tokens[some.id] > 0 or some.load.waiting_tokens > 0

        busy = any(has_prompts(other) for other in self._fleet.beside(worker))
        now, rows = self._loop.time(), len(frame.handles)
        self._costs.note_step(id, rows, now, prefill_busy=busy, computes_too=has_prompts(worker))

    def _note_load(self, id: WorkerId, load: Load) -> None:
        worker = self._fleet.get(id)
        if worker is None:
            return
        self._observer.worker_load(worker.link.address, worker.hello.role, load)
        if load.draining is not worker.load.draining:
            self._lives.note_draining(worker.link.address, load.draining, time.time())
        worker.load = load
        self._note_bytes_moved(worker.link.address, id, load.bytes_moved)

    def _note_bytes_moved(self, address: str, id: WorkerId, total: int) -> None:
        """Counts the bytes since the worker's last report, also of an earlier stream; a first report counts nothing."""
        last_id, last_total = self._bytes_moved.get(address, (None, 0))
        if last_id == id and total > last_total:
            self._observer.kv_bytes_moved(total - last_total)
        self._bytes_moved[address] = (id, total)


def _priority(entry: LedgerEntry) -> int:
    return entry.request.capsules[entry.choice].priority
