"""Gives jobs to the forker's processes, each within its limits, and tenants fairly beside each other.

A job is tried twice at most. First it has a short time, enough for all that clients ordinarily send; there are several
turns for that, and none lasts. A job that is not done by then waits for a turn of the long kind, and begins again. So
what takes long is behind what takes long, and never ahead of anything else.
"""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Never

import orjson
import structlog

from services.gateway.side.frames import (
    ANSWER_HEAD_BYTES,
    LENGTH,
    READY,
    JobEnd,
    JobKind,
    JobLimits,
    job_frame,
    read_answer_head,
)
from services.gateway.side.turns import Crowded, Turns
from services.process import lifeline

LONGEST_S = 1.0  # of a job, on a processor
MEMORY_BYTES = 256 << 20  # of a job, beside what every process has
ANSWER_BYTES = 16 << 20  # of a job

# On the clock a job may take ten times as long: the processors may have others to serve.
_SHORT = JobLimits(0.1, 1.0, MEMORY_BYTES, ANSWER_BYTES)
_LONG = JobLimits(LONGEST_S, 10.0, MEMORY_BYTES, ANSWER_BYTES)
_SHORT_TURNS = 3
_LONG_TURNS = 3
_MAX_WAIT_S = 20.0
_START_S = 60.0  # for the forker to load what jobs need
_NEXT_START_S = 2.0  # a job waits so long where the last start failed
_GRACE_S = 5.0  # after a job's time, for the forker to say so
_LAST_S = 1.0  # for a forker that has closed its output to end
# Variables in the environment that Python, libraries and chat templates (`strftime_now`) read.
_PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")

log = structlog.get_logger()


class JobFailed(Exception):
    """A job reached a limit, or ended its process. `end` says which. The job's value is at fault."""

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.name)
        self.end = end


class NoJobs(Exception):
    """The job could not be done now, through no fault of its own: another try is worth while."""


class ForkerEnded(Exception):
    """The forker ended, which it does not do by itself."""


class SideProcesses:
    """The processes beside a gateway. `run` must be running."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        """tokenizer: makes the model's tokenizer.json, which takes a while; asked when the forker starts."""
        self._tokenizer = tokenizer
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._tried = asyncio.Event()  # to start a forker, whether that failed or not
        self._process: Process | None = None
        self._jobs: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self._short = Turns(_SHORT_TURNS, max_wait_s=_MAX_WAIT_S)
        self._long = Turns(_LONG_TURNS, max_wait_s=_MAX_WAIT_S)

    @property
    def forker_pid(self) -> int | None:
        """The forker's process id; None: there is none now."""
        return None if self._process is None else self._process.pid

    async def run(self, *, at_once: bool = False) -> Never:
        """Runs a forker from the first job on, or at once, until it is cancelled.

        Raises ForkerEnded, and what makes the tokenizer or the start fail. It may then run again.
        """
        if not at_once:
            await self._wanted.wait()
        try:
            process = await self._start()
        except Exception:
            self._note_end()
            raise
        await self._serve(process)
        raise ForkerEnded(f"the forker ended with status {process.returncode}")

    async def do(self, kind: JobKind, value: Mapping[str, Any], tenant: str) -> dict[str, str]:
        """Returns a job's answer. Raises JobFailed, NoJobs, and TypeError for a value that is no JSON."""
        job = orjson.dumps({"kind": kind, **value})
        self._wanted.set()
        try:
            async with asyncio.timeout(_START_S):
                await self._tried.wait()
            async with asyncio.timeout(_NEXT_START_S):
                await self._ready.wait()
            try:
                async with self._short.turn(tenant):
                    return await self._try(job, _SHORT)
            except JobFailed as error:
                if error.end not in (JobEnd.TIME, JobEnd.STARVED):
                    raise
            async with self._long.turn(tenant):
                return await self._try(job, _LONG)
        except (Crowded, TimeoutError) as error:
            raise NoJobs from error
        except JobFailed as error:
            if error.end is JobEnd.STARVED:
                raise NoJobs from error
            raise

    async def _try(self, job: bytes, limits: JobLimits) -> dict[str, str]:
        process, number = self._process, next(self._numbers)
        if process is None or process.stdin is None:
            raise NoJobs
        self._jobs[number] = done = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(job_frame(number, limits, job))
            async with asyncio.timeout(limits.wall_s + _GRACE_S):
                answer: dict[str, str] = orjson.loads(await done)
                return answer
        except TimeoutError:
            if process.returncode is None:
                log.error("the forker hangs; it is killed")
                process.kill()
            raise
        finally:
            del self._jobs[number]
            if done.cancelled() and not process.stdin.is_closing():
                process.stdin.write(job_frame(number, limits, b""))

    async def _start(self) -> Process:
        setup = await asyncio.to_thread(lambda: orjson.dumps({"tokenizer": self._tokenizer()}))
        command = (sys.executable, "-P", "-m", "services.gateway.side.forker")
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=_environment())
        assert process.stdin is not None
        process.stdin.write(LENGTH.pack(len(setup)) + setup)
        return process

    async def _serve(self, process: Process) -> None:
        """Serves those who wait for answers until the forker's end."""
        self._process = process
        assert process.stdin is not None
        try:
            await self._take_answers(process)
            with contextlib.suppress(TimeoutError):  # a signal to a process that has just ended costs its status
                await asyncio.wait_for(process.wait(), _LAST_S)
        finally:
            self._note_end()
            for done in self._jobs.values():
                if not done.done():
                    done.set_exception(NoJobs())
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            await process.wait()

    def _note_end(self) -> None:
        """Notes that there is no forker: jobs wait for the next one, and not for long where this one did not start."""
        self._process = None
        if self._ready.is_set():
            self._ready.clear()
            self._tried.clear()
        else:
            self._tried.set()

    async def _take_answers(self, process: Process) -> None:
        """Hands answers to those who wait for them, until the forker closes its end."""
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):  # that is the end
            while True:
                head = read_answer_head(await process.stdout.readexactly(ANSWER_HEAD_BYTES))
                answer = await process.stdout.readexactly(head.length)
                if head.number == READY:
                    self._ready.set()
                    self._tried.set()
                elif (done := self._jobs.get(head.number)) is not None and not done.done():
                    _settle(done, JobEnd(head.end), answer)


def _settle(done: "asyncio.Future[bytes]", end: JobEnd, answer: bytes) -> None:
    match end:
        case JobEnd.DONE:
            done.set_result(answer)
        case JobEnd.NO_PROCESS:
            done.set_exception(NoJobs())
        case _:
            done.set_exception(JobFailed(end))


def _environment() -> dict[str, str]:
    """Returns the environment of the forker and of all jobs, which has no secrets."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **lifeline.environment()}
