"""Sends scripts at their times and keeps what comes back.

Answers are read when all have come, so that it costs the server under test nothing; while they would take more memory
than `_UNREAD_BYTES`, the oldest are read earlier. An answer that the next turn needs is read at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from loadtest import http_stream
from loadtest.bench.endpoints import Endpoint, Message
from loadtest.bench.outcome import Failure, FailureKind, Outcome
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.reading import read
from loadtest.bench.script import Script
from loadtest.bench.supply import Ready, Supply
from loadtest.http_stream import Address, Answer, HttpError

_UNREAD_BYTES = 64 << 20
_RECENT = 1024  # answers that ended since somebody looked


@dataclass(frozen=True, slots=True)
class Pacing:
    """The times of scripts, and bounds. Without arrivals: as soon as there is a place, `concurrency` of them or all.

    arrivals: when each script is due, in seconds after the start. keeps_times: a trace's own times instead.
    seconds: nothing is sent later. run_timeout_s: a request that is open then has failed.
    """

    concurrency: int | None = None
    arrivals: Iterator[float] | None = None
    keeps_times: bool = False
    seconds: float | None = None
    timeout_s: float = 600.0
    run_timeout_s: float | None = None

    def __post_init__(self) -> None:
        assert self.concurrency is None or self.concurrency >= 1, "without a place nothing would be sent"


async def drive(address: Address, endpoint: Endpoint, scripts: Iterable[Script], pacing: Pacing) -> Outcomes:
    """Sends all scripts, and returns the outcomes when the last answer has ended."""
    driver = Driver(address, endpoint, pacing, iter(scripts))
    await driver.run()
    return driver.read_rest()


@dataclass(frozen=True, slots=True)
class Open:
    """A request that was sent, and what has come of its answer."""

    number: int
    sent_s: float
    answer: Answer


class Driver:
    """Sends the scripts of one run. is_valid: a check of each answer's text, for workloads that ask for a form.

    keeps_recent: answers that ended are in `recent`, for who looks at them.
    """

    def __init__(
        self,
        address: Address,
        endpoint: Endpoint,
        pacing: Pacing,
        scripts: Iterator[Script],
        is_valid: Callable[[str], bool] | None = None,
        *,
        keeps_recent: bool = False,
    ) -> None:
        self._address = address
        self._endpoint = endpoint
        self._pacing = pacing
        self._is_valid = is_valid
        self._supply = Supply(scripts, endpoint)
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = None if pacing.concurrency is None else asyncio.Semaphore(pacing.concurrency)
        self._unread: deque[tuple[Outcome, Answer, int]] = deque()
        self._unread_bytes = 0
        self._began_s = 0.0
        self.outcomes = Outcomes()
        self.open: dict[int, Open] = {}
        self.recent: deque[Open] = deque(maxlen=_RECENT if keeps_recent else 0)
        self.num_failed = 0  # as far as that can be told without reading answers
        self.num_scripts_done = 0
        self._stopped = False

    async def run(self) -> None:
        """Sends all scripts, and returns when the last answer has ended or the run was stopped."""
        self._began_s = self.outcomes.began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            self._start(group, self._send_at_times(group) if self._is_open_loop else self._fill(group))

    def read_rest(self) -> Outcomes:
        """Reads the answers that are not read yet, and returns all outcomes."""
        while self._unread:
            self._read_oldest()
        return self.outcomes

    def stop(self) -> None:
        """Sends nothing more, and leaves the requests that are open. May be called more than once."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    @property
    def _is_open_loop(self) -> bool:
        return self._pacing.arrivals is not None or self._pacing.keeps_times

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _may_send(self) -> bool:
        seconds = self._pacing.seconds
        return not self._stopped and (seconds is None or time.perf_counter() - self._began_s < seconds)

    async def _send_at_times(self, group: asyncio.TaskGroup) -> None:
        while (ready := self._supply.take()) is not None:
            after_s = ready.at_s if self._pacing.arrivals is None else next(self._pacing.arrivals, None)
            assert after_s is not None
            due_s = self._began_s + after_s
            if self._pacing.seconds is not None and after_s > self._pacing.seconds:
                return
            while (early_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            self._start(group, self._converse_in_place(ready, due_s))

    async def _converse_in_place(self, ready: Ready, due_s: float) -> None:
        """Sends a script once there is a place for it; what it waits for that is no delay of the client.

        One whose place comes when the time is over is not sent.
        """
        if self._places is None:
            return await self._converse(ready, due_s)
        waits = self._places.locked()
        self.outcomes.waited += waits
        async with self._places:
            if not self._may_send():
                self.outcomes.unsent += 1
                return
            await self._converse(ready, time.perf_counter() if waits else due_s)

    async def _fill(self, group: asyncio.TaskGroup) -> None:
        """Starts all scripts at once, or as many places as there are, each of which takes one after the other."""
        if self._pacing.concurrency is None:
            while (ready := self._supply.take()) is not None:
                self._start(group, self._converse(ready, self._began_s))
            return
        for _ in range(self._pacing.concurrency):
            if (ready := self._supply.take()) is None:
                return
            self._start(group, self._converse_one_by_one(ready))

    async def _converse_one_by_one(self, ready: Ready | None) -> None:
        due_s = self._began_s
        while ready is not None and self._may_send():
            await self._converse(ready, due_s)
            due_s = time.perf_counter()
            ready = self._supply.take()

    async def _converse(self, ready: Ready, due_s: float) -> None:
        """Sends the requests of a script, each with the answers before it."""
        history: list[Message] = []
        body = ready.body
        for number, (turn, following) in enumerate(pairwise(ready.turns), 1):
            outcome, answer = await self._ask(body, due_s)
            self._read(outcome, answer, wants_text=True)
            if outcome.failure is None:
                await asyncio.sleep(ready.pause_s)
            if outcome.failure is not None or not self._may_send():
                self.outcomes.skipped += len(ready.turns) - number
                self.num_scripts_done += 1
                return
            assert isinstance(turn.prompt, str)
            history += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": outcome.text}]
            due_s = time.perf_counter()
            body = self._endpoint.body(following, history)
        self._keep(*await self._ask(body, due_s))
        self.num_scripts_done += 1

    async def _ask(self, body: bytes, due_s: float) -> tuple[Outcome, Answer]:
        outcome, answer, number = Outcome(due_s=due_s), Answer(), next(self._numbers)
        deadline_s, limit_s = self._limit()
        outcome.sent_s = time.perf_counter()
        self.open[number] = asked = Open(number, outcome.sent_s, answer)
        try:
            async with asyncio.timeout(deadline_s - outcome.sent_s):
                await http_stream.ask(self._address, self._endpoint.path, body, answer)
        except TimeoutError:
            outcome.failure = Failure(FailureKind.TIMEOUT, f"not finished after {limit_s:g} s")
        except HttpError as error:
            outcome.failure = Failure.of(error)
        except asyncio.CancelledError:
            self.outcomes.unfinished += 1
            raise
        finally:
            del self.open[number]
        outcome.ended_s = time.perf_counter()
        self.num_failed += outcome.failure is not None or _is_refusal(answer)
        self.recent.append(asked)
        return outcome, answer

    def _limit(self) -> tuple[float, float]:
        """The moment by which a request that begins now has failed, and the limit in seconds that says so."""
        own_s = time.perf_counter() + self._pacing.timeout_s
        if self._pacing.run_timeout_s is None or self._began_s + self._pacing.run_timeout_s > own_s:
            return own_s, self._pacing.timeout_s
        return self._began_s + self._pacing.run_timeout_s, self._pacing.run_timeout_s

    def _keep(self, outcome: Outcome, answer: Answer) -> None:
        """Keeps an answer for later; reads the oldest ones when all together are too large."""
        num_bytes = answer.num_bytes
        self._unread.append((outcome, answer, num_bytes))
        self._unread_bytes += num_bytes
        while self._unread_bytes > _UNREAD_BYTES:
            self._read_oldest()

    def _read_oldest(self) -> None:
        outcome, answer, num_bytes = self._unread.popleft()
        self._unread_bytes -= num_bytes
        self._read(outcome, answer, wants_text=self._is_valid is not None)

    def _read(self, outcome: Outcome, answer: Answer, *, wants_text: bool) -> None:
        read(answer, outcome, self._endpoint, wants_text=wants_text)
        if self._is_valid is not None and outcome.failure is None:
            self.outcomes.num_checked += 1
            self.outcomes.num_valid += self._is_valid(outcome.text)
        self.outcomes.add(outcome)


def _is_refusal(answer: Answer) -> bool:
    return bool(answer.pieces) and answer.pieces[0][9:12] != b"200"
