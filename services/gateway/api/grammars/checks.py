"""The check of grammars before workers get them.

A grammar is compiled once in a process that has limits: one that is wrong or too costly is refused with the library's
words, before any work is done for it.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from services.gateway.api.errors import unavailable
from services.gateway.api.grammars.forms import MAX_REASON, wrong
from services.gateway.side.frames import JobEnd, JobKind
from services.gateway.side.processes import LONGEST_S, MEMORY_BYTES, JobFailed, NoJobs, SideProcesses

_MAX_KNOWN = 4096  # grammars that are known to be right or wrong
_DIGEST_BYTES = 32
_TOO_COSTLY = {  # by: it was the time
    True: f"it takes longer than {LONGEST_S:g} s to follow it for one token",
    False: f"it takes more than {MEMORY_BYTES >> 20} MiB to follow it for one token",
}


@dataclass(slots=True)
class _Running:
    """A check that runs. num_waiting: those who asked for it and still wait."""

    reason: "asyncio.Task[str]"
    num_waiting: int = 0


class GrammarChecks:
    """Follows grammars for one token before they are sent to workers, in processes that have limits.

    What was found is kept, of those that were refused as well. All of a tenant who ask for one grammar at a time wait
    for one job; tenants do not, since the job of another may be behind all else of that tenant.
    """

    def __init__(self, processes: SideProcesses) -> None:
        self._processes = processes
        self._known: OrderedDict[bytes, str] = OrderedDict()  # why not, or empty, by digest; least recently used first
        self._running: dict[tuple[bytes, str], _Running] = {}  # by digest and tenant

    async def check(self, grammar: str, param: str, tenant: str) -> None:
        """Raises ApiError for a grammar that workers could not follow. `param`: the field that it comes from."""
        digest = blake2b(grammar.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest not in self._known:
            self._known[digest] = await self._shared(digest, grammar, tenant)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if reason := self._known[digest]:
            raise wrong(param, reason)

    async def _shared(self, digest: bytes, grammar: str, tenant: str) -> str:
        """Returns what `_why_not` does. That ends when nobody waits for it any more."""
        key = digest, tenant
        if (running := self._running.get(key)) is None:
            running = self._running[key] = _Running(asyncio.create_task(self._why_not(grammar, tenant)))
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.reason)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting or running.reason.done():
                running.reason.cancel()
                if self._running.get(key) is running:
                    del self._running[key]

    async def _why_not(self, grammar: str, tenant: str) -> str:
        """Returns why the grammar cannot be followed at a cost that can be borne; empty: it can. Raises ApiError."""
        try:
            answer = await self._processes.do(JobKind.GRAMMAR, {"grammar": grammar}, tenant)
        except JobFailed as error:
            return _TOO_COSTLY[error.end is JobEnd.TIME]
        except NoJobs as error:
            raise unavailable("The form of the answer cannot be looked at now. Try again later.", 1) from error
        return answer["error"][:MAX_REASON]
