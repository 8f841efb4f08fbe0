"""One process of the stack under test, over all its lives: started, killed, frozen, told to end, started again."""

import asyncio
import math
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

from loadtest.processes import Process, Started, started

_LOOK_S = 0.05


class Member:
    """A process by name. Who ends or freezes it on purpose has its `lock` until it runs again."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        self.lock = asyncio.Lock()
        # On perf_counter's clock: when the last life began, and when the last that was killed was gone.
        self._began_s = self._killed_s = -math.inf
        self._dying = False
        self._process = process
        self._life = AsyncExitStack()
        self._running: Started | None = None

    @property
    def pid(self) -> int | None:
        """The process id of this life; None where it has ended."""
        running = self._running
        return running.process.pid if running is not None and running.process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last life, negative for a signal; None while it runs."""
        return None if self._running is None else self._running.process.poll()

    @property
    def log(self) -> Path:
        """The file with the output of all its lives."""
        assert self._process.log is not None
        return self._process.log

    def check(self) -> None:
        """Raises ProcessError when it has ended."""
        if self._running is not None:
            self._running.check()

    async def start(self) -> None:
        """Begins a life, after the end of whatever is left of the one before."""
        await self.stop()
        self._began_s = time.perf_counter()
        self._running = await self._life.enter_async_context(started(self._process))

    async def stop(self) -> None:
        """Ends it, at first nicely."""
        self.send(signal.SIGCONT)
        await self._life.aclose()

    async def kill(self) -> None:
        """SIGKILL."""
        self._dying = True
        self.send(signal.SIGKILL)
        await self._life.aclose()
        self._killed_s, self._dying = time.perf_counter(), False

    def killed_since(self, moment_s: float) -> bool:
        """True when it was killed after a moment, or is being: the kernel takes connections for it until it is gone."""
        return self._dying or self._killed_s >= moment_s

    def began_since(self, moment_s: float) -> bool:
        """True when a life of it began after a moment."""
        return self._began_s >= moment_s

    def send(self, what: signal.Signals) -> None:
        """Sends a signal, if the process runs."""
        if self.pid is not None and self._running is not None:
            self._running.process.send_signal(what)

    async def ended(self, timeout_s: float) -> bool:
        """Waits for its end. False where it goes on."""
        until = time.monotonic() + timeout_s
        while self.pid is not None:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK_S)
        return True
