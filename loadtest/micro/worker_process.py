"""A whole worker in a process of its own, around a runner that is made there."""

import asyncio
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog

from loadtest.children import SPAWN, child
from loadtest.micro.marks import Marks, marking, new_marks
from services.config import WorkerRole
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.worker import Worker, WorkerParts

MakeParts = Callable[[WorkerRole], WorkerParts]  # called in the worker's process, so it must be one that can be pickled


class StartError(Exception):
    """A worker did not start; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves: its port and its marks."""

    port: int
    marks: Marks


@contextmanager
def running_pair(make_parts: MakeParts) -> Iterator[tuple[RunningWorker, RunningWorker]]:
    """Starts a prefill and a decode worker at the same time. Raises StartError."""
    with ExitStack() as processes:
        starting = [processes.enter_context(_process(make_parts, role)) for role in WorkerRole]
        prefill, decode = (RunningWorker(_port(pipe, role), marks) for role, pipe, marks in starting)
        yield prefill, decode


@contextmanager
def _process(make_parts: MakeParts, role: WorkerRole) -> Iterator[tuple[WorkerRole, Connection, Marks]]:
    marks: Marks = SPAWN.RawArray("d", new_marks())
    with child(_serve, make_parts, role, marks) as worker:
        yield role, worker.pipe, marks


def _port(pipe: Connection, role: WorkerRole) -> int:
    try:
        answer: int | str = pipe.recv()
    except EOFError:
        raise StartError(f"the {role} worker's process ended") from None
    if isinstance(answer, str):
        raise StartError(f"the {role} worker: {answer}")
    return answer


def _serve(pipe: Connection, make_parts: MakeParts, role: WorkerRole, marks: Marks) -> None:
    """Sends the worker's port up the pipe, or why there is none, and serves until nobody holds the pipe any more."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        worker = Worker(marking(make_parts(role), marks))
    except Exception:
        pipe.send(traceback.format_exc())
        return
    asyncio.run(_serve_worker(worker, pipe))


async def _serve_worker(worker: Worker, pipe: Connection) -> None:
    pipe.send(await worker.start("127.0.0.1:0"))
    asyncio.get_running_loop().add_reader(pipe.fileno(), worker.end)
    gc.collect()
    gc.freeze()
    await worker.ended
