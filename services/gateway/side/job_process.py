"""The process of one job, from its fork to its end."""

import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Never

from services.gateway.side.frames import JOB_HEAD_BYTES, LENGTH, JobHead, read_job_head
from services.gateway.side.jobs import Jobs
from services.process import lifeline

_MAX_FDS = 16
NOT_BEGUN = 1  # the status with which a process ends that failed before its job began
_FAILED = 2
TIME_SIGNAL = signal.SIGPROF  # ends a process whose time on a processor is used up


def serve_one_job(jobs: Jobs, pipe: socket.socket, forker: int) -> Never:
    """Waits for a job in a process that was just forked, does it, answers, and ends the process.

    forker: the id of the process that forked it.
    """
    status = NOT_BEGUN
    try:
        _leave_all_but(pipe)
        lifeline.hold_to(forker)
        own = socket.socket(fileno=0)
        jobs.warm_up()
        head = read_job_head(_receive(own, JOB_HEAD_BYTES))
        value = _receive(own, head.length)
        _limit(head)
        status = _FAILED
        answer = jobs.do(value)
        own.sendall(LENGTH.pack(len(answer)) + answer)
    except BaseException:  # nothing here is anybody else's: the forker sees that there is no whole answer
        os._exit(status)
    os._exit(0)


def _leave_all_but(pipe: socket.socket) -> None:
    """Closes all files but this one, which becomes the input. What libraries write is not the gateway's log."""
    os.dup2(pipe.fileno(), 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _receive(pipe: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (part := pipe.recv(length - len(data))):
            os._exit(0)  # the forker ended, or needs this process no more
        data += part
    return bytes(data)


def _limit(head: JobHead) -> None:
    """Sets the limits of this process. The forker has the one on the clock."""
    signal.signal(TIME_SIGNAL, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, head.cpu_ms / 1000)  # of all threads, finer than RLIMIT_CPU's whole seconds
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: _MAX_FDS,
    }
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the kernel's choice is then another
            Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this process goes first
        limits[resource.RLIMIT_AS] = _address_space() + head.memory_bytes
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _address_space() -> int:
    """Returns the size of this process's address space, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
