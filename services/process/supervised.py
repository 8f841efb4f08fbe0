"""A part of a process that goes on after its own failures: whatever it raises reaches nobody else.

For each member of a task group, each endless loop and each task that nobody awaits. An error that the part expects is
handled in it; what comes here is a defect, or the system's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.process.backoff import Backoff

_FIRST_S, _LONGEST_S = 0.2, 5.0
_FORGIVEN_S = 60.0  # a part that ran for so long fails as for the first time

T = TypeVar("T")

log = structlog.get_logger()


def log_failure(part: str, error: Exception) -> None:
    """Logs a failure with its traceback."""
    log.error("a part failed; it is tried again", part=part, exc_info=error)


async def supervised(
    part: str, run: Callable[[], Awaitable[T]], report: Callable[[str, Exception], None] = log_failure
) -> T:
    """Returns what `run` returns. Where it fails it is run again, after a wait that doubles up to 5 s.

    part: its name, for people. report: is told of a failure, once for the same one in a row. Must not fail.
    """
    backoff, said = Backoff(_FIRST_S, _LONGEST_S), ""
    while True:
        began = time.monotonic()
        try:
            return await run()
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # it failed just as it was cancelled
            if time.monotonic() - began > _FORGIVEN_S:
                backoff.reset()
                said = ""
            if (reason := repr(error)) != said:
                report(part, error)
                said = reason
        await asyncio.sleep(backoff.next_s())
