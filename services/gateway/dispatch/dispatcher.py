"""The dispatch side of the gateway: has tokens made for the API side.

Joins the links to the workers, the ledger and the router. A request is driven by whoever reads it: the reader places
it, waits for news, and places it again after an attempt failed. So there is no task for a request, and none for a
token.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import NoReturn, Protocol

import structlog

from kvtransfer.ids import GatewayId, WorkerId
from services.config import WorkerRole
from services.gateway.api.generation import GenerationRequest, Overloaded, TooLarge, Unavailable
from services.gateway.dispatch.costs import CostModel
from services.gateway.dispatch.fleet import Fleet, LiveWorker
from services.gateway.dispatch.ledger import Ledger, LedgerObserver, LedgerRow, handles_needed
from services.gateway.dispatch.links import LinkRefused, WorkerLink
from services.gateway.dispatch.reader import Reader, Relays
from services.gateway.dispatch.router import Demand, NoPlan, Plan, Policy, make_plan
from services.prefix_index.base import PrefixIndex
from services.protocol.block_hash import BlockHash
from services.protocol.frames import Failure, Frame, Load
from services.protocol.messages import MAX_HANDLE, BlockEvents, Command, GatewayHello, WorkerHello

# When a machine stalls, all streams break at once. Requests that wait give the second of a pair the time to follow the
# first, or all of them would be served without a handoff.
_REUNION_S = 0.2

log = structlog.get_logger()


class DispatchObserver(LedgerObserver, Protocol):
    """Counts what the dispatch side sees. `worker` is an address."""

    def worker_up(self, worker: str, hello: WorkerHello) -> None:
        """Its stream began."""

    def worker_load(self, worker: str, role: WorkerRole, load: Load) -> None:
        """The latest word of a live worker."""

    def worker_gone(self, worker: str, role: WorkerRole) -> None:
        """Its stream ended."""

    def planned(self, plan: Plan) -> None:
        """A request goes to these workers."""

    def kv_bytes_moved(self, count: int) -> None:
        """So many more KV bytes were read from other workers."""


class Dispatcher:
    """A `Generator` over the workers at given addresses. Works while `run` runs."""

    def __init__(
        self,
        addresses: Iterable[str],
        policy: Policy,
        max_waiting: int,
        index: PrefixIndex,
        observer: DispatchObserver,
        model: str = "",
    ) -> None:
        """`model`: workers that name another one are refused; empty: none is."""
        self._model = model
        self._policy = policy
        self._max_waiting = max_waiting
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._links = {address: WorkerLink(address, self) for address in addresses}
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}  # of the links, while `run` runs
        self._fleet = Fleet(index)
        self._relays = Relays()
        self._gateway_id = GatewayId(secrets.randbits(64))
        self._costs = CostModel()
        self._ledger = Ledger(self._send, self._loop.time, observer, self._costs)
        self._turn = 0
        self._tried = False  # every address that was known at the start
        self._bytes_moved: dict[str, tuple[WorkerId, int]] = {}  # by address: what its last worker said last
        self.max_model_len: int | None = None

    async def run(self) -> None:
        """Keeps the streams to all workers up, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for link in self._links.values():
                self._start_link(link)
            await asyncio.Event().wait()  # links come and go

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Connects to those that are new, and gives up those that are gone, while `run` runs.

        Where a worker is connected its stream has the word on whether it lives, not the list.
        """
        wanted = set(addresses)
        for address in wanted - self._links.keys():
            self._links[address] = link = WorkerLink(address, self)
            self._start_link(link)
        for address in self._links.keys() - wanted:
            if not self._links[address].connected:
                del self._links[address]
                self._tasks.pop(address).cancel()

    def _start_link(self, link: WorkerLink) -> None:
        self._tasks[link.address] = self._group.create_task(link.run())

    # For the API side

    def ready(self) -> bool:
        """See Generator. At the start, not before every address was tried, or the first requests would find no pair."""
        links = self._links.values()
        self._tried = self._tried or (len(links) > 0 and all(link.tried for link in links))
        return self._fleet.has(WorkerRole.DECODE) and self._tried

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Reader]:
        """See Generator."""
        if len(self._ledger) + len(request.capsules) > self._max_waiting:
            raise Overloaded(f"{len(self._ledger)} of at most {self._max_waiting} choices are in flight already")
        reader = Reader(self._place, self._ledger.close, self._relays)
        rows = [self._ledger.open(request, choice, reader.wake) for choice in range(len(request.capsules))]
        timer = self._loop.call_at(rows[0].deadline, self._expire, rows)
        try:
            for first in range(0, len(rows), request.num_choices):
                if await self._place(rows[first : first + request.num_choices]) is NoPlan.NO_WORKER:
                    raise Unavailable("no worker that can run the request is connected")
            for row in rows:
                if row.error is not None:
                    raise row.error
            reader.start(rows)
            yield reader
        finally:
            timer.cancel()
            for row in rows:
                self._ledger.close(row)
            reader.stop()

    def _expire(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self._ledger.on_deadline(row)

    # For the links

    def gateway_hello(self) -> GatewayHello:
        """See LinkListener."""
        return GatewayHello(self._gateway_id, self._ledger.highest_handle, self._fleet.index.wants_block_events)

    def worker_up(self, link: WorkerLink, hello: WorkerHello) -> None:
        """See LinkListener."""
        worker = hello.worker_id
        if self._fleet.get(worker) is not None:
            raise LinkRefused("the same worker is connected under another address")
        if hello.model and self._model and hello.model != self._model:
            raise LinkRefused("it serves another model: its configuration or tokenizer differs")
        load = Load(available_blocks=hello.num_blocks)
        self._fleet.add(live := LiveWorker(worker, link, hello, load))
        for other in self._fleet.cut_off_from(live):
            has, others = ", ".join(hello.transports), ", ".join(other.hello.transports)
            words = f"{link.address} has {has}, {other.link.address} has {others}: they cannot hand over to each other"
            log.warning("two workers never pair", reason=words)
        self._ledger.on_return(worker)
        self._observer.worker_up(link.address, hello)
        self._observer.worker_load(link.address, hello.role, load)
        self.max_model_len = self._fleet.max_model_len()
        others_missing = any(not other.connected for other in self._links.values() if other is not link)
        self._loop.call_later(_REUNION_S if others_missing else 0, self._wake_waiting)

    def _wake_waiting(self) -> None:
        for row in self._ledger:
            if row.attempt is None:
                row.wake()

    def worker_said(self, worker: WorkerId, message: Frame | BlockEvents) -> None:
        """See LinkListener."""
        if self._fleet.get(worker) is None:
            return
        if isinstance(message, BlockEvents):
            self._fleet.index.apply(worker, message)
            return
        self._note_step(worker, message)
        self._ledger.on_rows(worker, message.rows())
        for failure in message.failures:
            self._on_failure(worker, failure)
        if message.load is not None:
            self._note_load(worker, message.load)

    def worker_down(self, worker: WorkerId) -> None:
        """See LinkListener."""
        if self._fleet.get(worker) is None:
            return
        gone = self._fleet.remove(worker)
        self._observer.worker_gone(gone.link.address, gone.hello.role)
        self._costs.remove_worker(worker)
        self.max_model_len = self._fleet.max_model_len() or self.max_model_len
        self._ledger.on_lost(worker)

    # For people

    def describe(self) -> dict[str, object]:
        """The ledger and the live workers, as plain values."""
        now = self._loop.time()
        return {
            "gateway": f"{self._gateway_id:016x}",
            "rows": [_describe_row(row, now) for row in self._ledger],
            "workers": [_describe_worker(worker) for worker in self._fleet],
            "learned": asdict(self._costs.figures()),
        }

    async def _place(self, rows: Sequence[LedgerRow]) -> NoPlan | None:
        """Starts the next attempt of rows that have the same tokens. Closes them when no worker is large enough."""
        row = rows[0]
        prefix = await self._fleet.look_up(row.capsule())
        if row.closed:
            return None
        if self._ledger.highest_handle + handles_needed(len(rows)) > MAX_HANDLE:
            self._begin_again()
        demand = Demand(
            num_tokens=row.length,
            one_token=row.length + 1 == row.max_len,
            larger_than=row.larger_than,
            avoid=row.still_avoided(self._loop.time()),
        )
        self._fleet.deepen(prefix, self._ledger.queued_blocks)
        counts = (self._ledger.queued_tokens, self._ledger.assigned, self._ledger.generating)
        candidates = self._fleet.candidates(prefix.depths, *counts)
        plan = make_plan(candidates, demand, self._policy, self._turn, self._costs.figures())
        self._turn += 1
        if isinstance(plan, NoPlan):
            if plan is NoPlan.TOO_LARGE:
                for row in rows:
                    self._ledger.close(row, TooLarge("the request needs more KV memory than any worker has"))
            return plan
        self._observer.planned(plan)
        most = self._fleet.most_choices(plan)
        blocks = self._fleet.missing_blocks(prefix, plan.computes)
        for first in range(0, len(rows), most):
            self._start(rows[first : first + most], plan, blocks if first == 0 else ())
        self._fleet.placed(prefix, plan)
        return None

    def _start(self, rows: Sequence[LedgerRow], plan: Plan, blocks: Sequence[BlockHash]) -> None:
        self._ledger.start(rows, plan, blocks)
        row = rows[0]
        assert row.attempt is not None
        log.info(
            "placed",
            request_id=row.request.request_id,
            handle=row.attempt.handle,
            choices=len(rows),
            attempt=row.attempts,
            tokens=row.length,
            predicted_cached=row.attempt.predicted_cached,
            prefill=plan.prefill.address if plan.prefill else None,
            decode=plan.decode.address if plan.decode else None,
            why=plan.why.value,
        )

    def _begin_again(self) -> None:
        """All handles are used up: goes on under a new id, whose streams know none of the old ones.

        What is in flight continues from its capsules, as after the loss of every worker.
        """
        self._gateway_id = GatewayId(secrets.randbits(64))
        for worker in list(self._fleet):
            worker.link.reset("the gateway begins a new incarnation")
            self.worker_down(worker.id)
        self._ledger.highest_handle = 0

    def _send(self, worker: WorkerId, command: Command) -> None:
        live = self._fleet.get(worker)
        if live is not None:
            live.link.send(command)

    def _on_failure(self, worker: WorkerId, failure: Failure) -> None:
        if not (rows := self._ledger.find(failure.handle)):
            return
        log.info(
            "attempt failed",
            request_id=rows[0].request.request_id,
            handle=failure.handle,
            worker=f"{worker:016x}",
            code=failure.code.name,
            detail=failure.detail,
        )
        self._ledger.on_failure(worker, failure)

    def _note_step(self, id: WorkerId, frame: Frame) -> None:
        """A decode worker's frames follow its steps."""
        worker = self._fleet.get(id)
        if worker is None or worker.hello.role is not WorkerRole.DECODE or not len(frame.handles):
            return

        def has_prompts(some: LiveWorker) -> bool:
            return self._ledger.queued_tokens[some.id] > 0 or some.load.waiting_tokens > 0

        busy = any(has_prompts(other) for other in self._fleet.beside(worker))
        now, rows = self._loop.time(), len(frame.handles)
        self._costs.note_step(id, rows, now, prefill_busy=busy, computes_too=has_prompts(worker))

    def _note_load(self, id: WorkerId, load: Load) -> None:
        worker = self._fleet.get(id)
        if worker is None:
            return
        self._observer.worker_load(worker.link.address, worker.hello.role, load)
        worker.load = load
        self._note_bytes_moved(worker.link.address, id, load.bytes_moved)

    def _note_bytes_moved(self, address: str, id: WorkerId, total: int) -> None:
        """Counts what came since this worker's last word, on whichever stream; not what was moved before the first."""
        last_id, last_total = self._bytes_moved.get(address, (None, 0))
        if last_id == id and total > last_total:
            self._observer.kv_bytes_moved(total - last_total)
        self._bytes_moved[address] = (id, total)


def _describe_row(row: LedgerRow, now: float) -> dict[str, object]:
    attempt = row.attempt
    plan = attempt.plan if attempt else None
    return {
        "request_id": row.request.request_id,
        "handle": attempt.handle if attempt else None,
        "phase": attempt.phase.value if attempt else "waiting",
        "prefill": plan.prefill.address if plan and plan.prefill else None,
        "decode": plan.decode.address if plan and plan.decode else None,
        "choice": row.choice,
        "prompt_tokens": row.num_prompt,
        "why": plan.why.value if plan else None,
        "expected_s": {"pair": plan.pair_s, "alone": plan.alone_s} if plan else None,
        "tokens_delivered": len(row.generated),
        "attempts": row.attempts,
        "deadline_in_s": round(row.deadline - now, 3),
    }


def _describe_worker(worker: LiveWorker) -> dict[str, object]:
    return {
        "address": worker.link.address,
        "incarnation": f"{worker.id:016x}",
        "role": worker.hello.role.value,
        "running": worker.load.running,
        "waiting": worker.load.waiting,
        "available_blocks": worker.load.available_blocks,
        "quarantined_blocks": worker.load.quarantined_blocks,
        "num_blocks": worker.hello.num_blocks,
        "transports": worker.hello.transports,
        "max_num_seqs": worker.hello.max_num_seqs,
        "kernels": worker.hello.kernels,
    }
