"""One supervisor for each child process: it starts the child, relays what it says, and starts it again when it dies.

    start ──▶ loading ──probe──▶ ready ──ends──▶ wait ──▶ start ...
                  ├─not ready in time: is ended─┐
                  └─ends before it was ever ready─▶ ChildFailed, as after 30 s in which it cannot be run
    retired or cancelled, in any state: SIGTERM, a grace, SIGKILL

A supervisor's `run` returns when the child was retired, and raises otherwise. No child outlives it. What fails around a
child (its start, its probe, its output, the display) is that child's alone, is said once and tried again.
"""

import asyncio
import re
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from services.config import WorkerRole
from services.launcher.listener import Listener, SafeListener
from services.launcher.readiness import NeverReady, NotYet, Probe
from services.process.backoff import Backoff
from services.process.supervised import supervised

_PROBE_INTERVAL_S = 0.1
_LONG_S = 10.0  # for a child that serves, and waits for something else
_LONG_LIFE_S = 60.0  # a child that ran for so long is started again as after its first death
_PATIENCE_S = 30.0  # with a child that was never ready and cannot be run, by the interpreter that runs this process
_LAST_WORDS_S = 1.0  # for output that is still in the pipe when the child is gone
_MAX_LINE_BYTES = 1 << 20
_MAX_HELD_LINES = 200


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in its stack. A worker that replaces another one has the same."""

    role: WorkerRole
    number: int  # among workers of its role
    index: int  # among all workers


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child to start, and the probe that tells whether it serves."""

    name: str
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of all children
    inherited_fds: tuple[int, ...] = ()  # stay open in the child
    ready_within_s: float = 1800.0  # what is not ready by then is ended
    place: Place | None = None  # None: it is no worker
    # Makes the spec of a child that can serve beside this one and then in its place. None: there is no such.
    successor: "Callable[[], ChildSpec] | None" = None


class ChildFailed(Exception):
    """A child ended before it was ever ready. `lines`: the last ones that it wrote.

    hopeless: it was ended while it ran, since it would never be ready; its last line is then no reason.
    """

    def __init__(self, name: str, how: str, lines: list[str], *, hopeless: bool = False) -> None:
        reason = re.sub(r"^baton[a-z ]*: ", "", lines[-1]) if lines and not hopeless else how
        super().__init__(f"{name} did not start: {reason}")
        self.name = name
        self.how = how
        self.lines = lines
        self.hopeless = hopeless


class Supervisor:
    """Keeps one child running."""

    def __init__(
        self,
        spec: ChildSpec,
        environment: Mapping[str, str],
        listener: Listener,
        backoff: Backoff,
        grace_s: float,
    ) -> None:
        self.spec = spec
        self.was_ready = asyncio.Event()
        self.waits_long = asyncio.Event()  # the probe said for long what the child waits for
        self.waits_for = ""  # as the probe said last
        self._environment = {**environment, **spec.environment}
        self._listener = SafeListener(listener)
        self._backoff = backoff
        self._grace_s = grace_s
        self._held: deque[str] = deque(maxlen=_MAX_HELD_LINES)
        self._ending: asyncio.subprocess.Process | None = None
        self._retired = asyncio.Event()
        self._hopeless = ""  # the reason why this life's child was ended before it was ready
        self._serves = False

    @property
    def retired(self) -> bool:
        """True for a child that was told to end for good, whether it has ended or not."""
        return self._retired.is_set()

    @property
    def serves(self) -> bool:
        """True from the moment at which the probe found that the child serves until it ends or is told to end."""
        return self._serves and not self.retired

    async def run(self) -> None:
        """Starts the child, again and again, until it is retired. Raises ChildFailed if it is never ready."""
        failing_since: float | None = None  # the first of the last tries in a row in which it could not be run
        said = ""
        while True:
            started, self._hopeless = time.monotonic(), ""
            try:
                how, failing_since = _how_it_ended(await self._one_life()), None
            except Exception as error:  # no interpreter, descriptor or memory at this moment, most likely
                how, failing_since = f"it cannot be run: {error!r}", failing_since or started
            if self._retired.is_set():
                return
            how = self._hopeless or how
            for_a_moment = failing_since is not None and time.monotonic() < failing_since + _PATIENCE_S
            if not self.was_ready.is_set() and not for_a_moment:
                lines = [line for line in self._held if line.strip()]
                raise ChildFailed(self.spec.name, how, lines, hopeless=bool(self._hopeless))
            if time.monotonic() - started >= _LONG_LIFE_S:
                self._backoff.reset()
            delay_s = self._backoff.next_s()
            if failing_since is None or how != said:
                self._listener.died(self.spec.name, how, delay_s)
            said = how
            with suppress(TimeoutError):
                await asyncio.wait_for(self._retired.wait(), delay_s)
                return

    def retire(self) -> None:
        """Ends the child as if cancelled; `run` returns when it has ended."""
        self._retired.set()

    def hurry(self) -> None:
        """Ends the child's grace, now or when it is told to end."""
        self._grace_s = 0.0
        if self._ending is not None:
            _kill(self._ending)

    async def _one_life(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            pass_fds=self.spec.inherited_fds,
            process_group=0,  # a terminal's Ctrl-C is for the launcher, which then ends children in order
        )
        assert process.stdout is not None
        async with asyncio.TaskGroup() as tasks:
            output = process.stdout
            relay = tasks.create_task(supervised("its output", lambda: self._relay(output), self._say_failed))
            announce = tasks.create_task(self._announce_ready(process))
            retire = tasks.create_task(self._end_when_retired(process))
            try:
                return await process.wait()
            finally:
                self._serves = False
                announce.cancel()
                retire.cancel()
                await self._end(process)
                await asyncio.wait([relay], timeout=_LAST_WORDS_S)
                relay.cancel()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        if self._ending is None:  # a second SIGTERM would tell the child to end at once
            self._ending = process
            with suppress(ProcessLookupError):  # it ended in this moment
                process.terminate()
        try:
            async with asyncio.timeout(self._grace_s):
                await process.wait()
        except TimeoutError:
            _kill(process)
            await process.wait()
        self._ending = None

    async def _end_when_retired(self, process: asyncio.subprocess.Process) -> None:
        await self._retired.wait()
        await self._end(process)

    async def _announce_ready(self, process: asyncio.subprocess.Process) -> None:
        started = time.monotonic()
        until = started + self.spec.ready_within_s
        self._hopeless = await supervised("its probe", lambda: self._until_ready(process.pid, until), self._say_failed)
        if self._hopeless:
            await self._end(process)
            return
        self._listener.ready(self.spec.name, time.monotonic() - started)
        self._serves = True
        self.was_ready.set()
        while self._held:
            self._listener.line(self.spec.name, self._held.popleft())

    def _say_failed(self, part: str, error: Exception) -> None:
        self._listener.say(f"{self.spec.name}: {part} failed, and is tried again: {error!r}")

    async def _until_ready(self, pid: int, until: float) -> str:
        """Returns an empty text when the child serves, and otherwise the reason why there is no use in waiting."""
        waits_since: float | None = None
        while time.monotonic() < until:
            answer = await self.spec.probe(pid)
            if isinstance(answer, NeverReady):
                return answer.reason
            if answer is True:
                return ""
            if isinstance(answer, NotYet):
                self.waits_for = answer.reason
                waits_since = waits_since or time.monotonic()
                if time.monotonic() > waits_since + _LONG_S:
                    self.waits_long.set()
            else:
                self.waits_for, waits_since = "", None
            await asyncio.sleep(_PROBE_INTERVAL_S)
        why = f": {self.waits_for}" if self.waits_for else ""
        return f"it was not ready within {self.spec.ready_within_s:g} s{why}"

    async def _relay(self, output: asyncio.StreamReader) -> None:
        async for line in _lines(output):
            if self.was_ready.is_set():
                self._listener.line(self.spec.name, line)
            else:
                self._held.append(line)
                self._listener.loading(self.spec.name, line)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it ended in this moment
        process.kill()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length; one above the limit comes in pieces."""
    rest = bytearray()
    while chunk := await stream.read(1 << 16):
        *ends, start = chunk.split(b"\n")
        for end in ends:
            yield (rest + end).decode(errors="replace")
            rest.clear()
        rest += start
        if len(rest) > _MAX_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest.clear()
    if rest:
        yield rest.decode(errors="replace")


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"signal {-returncode}, {signal.strsignal(-returncode)}"
