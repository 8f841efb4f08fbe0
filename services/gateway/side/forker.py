"""The process that forks a process for each job: `python -m services.gateway.side.forker`, which a gateway starts.

What all jobs need is loaded here, once, so that a fork has it. Nothing of a job runs here: one that is killed costs a
fork, one that spoils its process spoils no other's. Some processes are forked ahead and wait, so a job waits for no
fork. The forker has one thread, as a process has to that forks.

It ends when its gateway's end of its input is closed, or its gateway is gone (`services/process/lifeline.py`); its jobs
then end with it. Signals to the whole group of processes, as a terminal or a service manager sends them, leave it: the
gateway drains, and needs it until then.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from services.gateway.side.frames import (
    JOB_HEAD_BYTES,
    LENGTH,
    READY,
    JobEnd,
    JobHead,
    answer_frame,
    read_job_head,
)
from services.gateway.side.job_process import NOT_BEGUN, TIME_SIGNAL, serve_one_job
from services.gateway.side.jobs import Jobs
from services.process import lifeline
from services.process.signals import leave_to_parent

_WAITING = 4  # processes that are forked ahead, of 1 MiB each beside what they share
_READ_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _Process:
    """The process of a job, or one that waits for a job."""

    pid: int
    pipe: socket.socket
    job: JobHead | None = None
    began: float = 0.0
    answer: bytearray = field(default_factory=bytearray)


class Forker:
    """Forks processes, hands them jobs, and ends those that reach a limit."""

    def __init__(self, jobs: Jobs, gateway_in: int, gateway_out: int) -> None:
        self._jobs = jobs
        self._in = gateway_in
        self._out = gateway_out
        self._inbox = bytearray()
        self._waiting: deque[_Process] = deque()
        self._running: dict[int, _Process] = {}  # by the job's number
        self._selector = selectors.DefaultSelector()
        self._selector.register(gateway_in, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves the gateway until it closes its end."""
        self._answer(answer_frame(READY, JobEnd.DONE))
        while True:
            if not self._running or not self._waiting:  # a fork takes longer than most jobs, whose answers would wait
                self._fork_ahead()
            for key, _ in self._selector.select(self._until_next_deadline()):
                if key.data is not None:
                    self._hear(key.data)
                elif not self._take():
                    return
            self._end_late_ones()

    def _fork_ahead(self) -> None:
        with contextlib.suppress(OSError):  # no room for a process now: the next job tries again, and says so
            while len(self._waiting) < _WAITING:
                self._waiting.append(self._fork())

    def _fork(self) -> _Process:
        ours, theirs = socket.socketpair()
        forker = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            serve_one_job(self._jobs, theirs, forker)
        theirs.close()
        return _Process(pid, ours)

    def _take(self) -> bool:
        """Takes what the gateway sends. False: it has closed its end."""
        if not (data := os.read(self._in, _READ_BYTES)):
            return False
        self._inbox += data
        while len(self._inbox) >= JOB_HEAD_BYTES:
            head = read_job_head(self._inbox)
            end = JOB_HEAD_BYTES + head.length
            if len(self._inbox) < end:
                break
            frame = bytes(self._inbox[:end])
            del self._inbox[:end]
            if head.length:
                self._begin(head, frame)
            elif head.number in self._running:  # else it has just ended
                self._end(self._running[head.number], None)
        return True

    def _begin(self, head: JobHead, frame: bytes) -> None:
        try:
            process = self._handed_to(frame)
        except OSError:
            self._answer(answer_frame(head.number, JobEnd.NO_PROCESS))
            return
        process.job, process.began = head, monotonic()
        self._running[head.number] = process
        self._selector.register(process.pipe, selectors.EVENT_READ, process)

    def _handed_to(self, frame: bytes) -> _Process:
        """Hands a job to a process, and returns that. Raises OSError where none can be forked."""
        while True:
            forked_ahead = bool(self._waiting)
            process = self._waiting.popleft() if forked_ahead else self._fork()
            try:
                process.pipe.sendall(frame)
                return process
            except OSError:  # it was killed while it waited, or could not begin
                process.pipe.close()
                os.waitpid(process.pid, 0)
                if not forked_ahead:
                    raise

    def _hear(self, process: _Process) -> None:
        """Takes a part of a job's answer, or its end."""
        head = process.job
        assert head is not None
        if self._running.get(head.number) is not process:
            return  # it was ended in this turn
        try:
            part = process.pipe.recv(_READ_BYTES)
        except ConnectionError:
            part = b""
        answer = process.answer
        answer += part
        length = LENGTH.unpack_from(answer)[0] if len(answer) >= LENGTH.size else 0
        if length > head.answer_bytes:
            self._end(process, JobEnd.SIZE)
        elif length and len(answer) == LENGTH.size + length:
            self._answer(answer_frame(head.number, JobEnd.DONE, answer[LENGTH.size :]))  # it need not wait for its end
            self._end(process, None)
        elif not part:
            self._end(process, JobEnd.DIED)

    def _until_next_deadline(self) -> float | None:
        return min((max(0.0, _deadline(process) - monotonic()) for process in self._running.values()), default=None)

    def _end_late_ones(self) -> None:
        now = monotonic()
        for process in [process for process in self._running.values() if _deadline(process) <= now]:
            self._end(process, JobEnd.STARVED)

    def _end(self, process: _Process, end: JobEnd | None) -> None:
        """Ends a job's process and says how it ended. None: nobody needs to know."""
        head = process.job
        assert head is not None
        del self._running[head.number]
        self._selector.unregister(process.pipe)
        process.pipe.close()
        if end is not JobEnd.DIED:
            os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        if end is JobEnd.DIED:
            end = _meaning(status)
        if end is not None:
            self._answer(answer_frame(head.number, end))

    def _answer(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self._out, view) :]


def _meaning(status: int) -> JobEnd:
    """Returns how a job ended whose process ended itself, or was ended by others. status: as `waitpid` has it."""
    match os.waitstatus_to_exitcode(status):
        case code if code == -TIME_SIGNAL:
            return JobEnd.TIME
        case code if code in (NOT_BEGUN, -signal.SIGKILL):  # the kernel's, where memory is short, or a person's
            return JobEnd.NO_PROCESS
        case _:
            return JobEnd.DIED


def _deadline(process: _Process) -> float:
    assert process.job is not None
    return process.began + process.job.wall_ms / 1000


def _read_setup(gateway_in: int) -> bytes:
    (length,) = LENGTH.unpack(_read(gateway_in, LENGTH.size))
    return _read(gateway_in, length)


def _read(fd: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (part := os.read(fd, min(_READ_BYTES, length - len(data)))):
            sys.exit(0)  # the gateway ended
        data += part
    return bytes(data)


def main() -> None:
    """Runs the forker. Its input and output are pipes of the gateway."""
    lifeline.hold()
    leave_to_parent()
    jobs = Jobs(_read_setup(0))
    gc.collect()
    gc.freeze()  # so that no collection in a fork writes to what it shares
    with contextlib.suppress(BrokenPipeError):  # the gateway ended
        Forker(jobs, 0, 1).run()


if __name__ == "__main__":
    main()
