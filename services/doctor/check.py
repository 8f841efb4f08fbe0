"""Checks, all at once, each with a limit of time."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from services.doctor.finding import CannotCheck, Examined, Finding, error, note

Look = Callable[[], Awaitable[list[Finding]]]


@dataclass(frozen=True, slots=True)
class Check:
    """A group of findings, and how to get them. look: raises CannotCheck or OSError where it cannot be done."""

    group: str
    look: Look
    limit_s: float = 4.0


async def examine(checks: Sequence[Check]) -> list[Examined]:
    """Carries out all checks side by side; returns their findings in the order of the checks."""
    return await asyncio.gather(*map(_examine, checks))


async def _examine(check: Check) -> Examined:
    limit = asyncio.timeout(check.limit_s)
    try:
        async with limit:
            findings = await check.look()
    except (CannotCheck, OSError) as reason:  # TimeoutError is an OSError
        why = f"no result within {check.limit_s:g} s" if limit.expired() else str(reason)
        findings = [note("not checked", why)]
    except Exception as defect:  # of this check: what the others found is worth the same
        findings = [error("not checked", f"the check failed: {defect!r}", "it is a defect of this check: report it")]
    return Examined(check.group, tuple(findings))


def in_thread(look: Callable[[], list[Finding]]) -> Look:
    """Makes a look of a function that blocks. One that never returns holds up neither others nor the end."""

    async def looked() -> list[Finding]:
        future: Future[list[Finding]] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled any more, only left alone
        threading.Thread(target=_fulfil, args=(future, look), daemon=True).start()
        return await asyncio.wrap_future(future)

    return looked


def _fulfil(future: "Future[list[Finding]]", look: Callable[[], list[Finding]]) -> None:
    try:
        future.set_result(look())
    except BaseException as reason:
        future.set_exception(reason)
