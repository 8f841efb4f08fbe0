"""Times of attempts that have no row yet. A gateway is told them with an attempt's first row, or its failure.

    submitted ──▶ announced ──▶ admitted ──▶ ready ──▶ first row       a handoff that this worker takes
    submitted ─────────────────▶ admitted ───────────▶ first row       a prompt that it computes

A decoding sequence costs nothing here: it is known no more. Times are those of the core's clock, in seconds.
"""

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.moved import Moved
from services.engine.sequences.outputs import StepRows
from services.engine.sequences.request import Request
from services.protocol.frames import Timing
from services.worker.frame_builder import PendingFrames


@dataclass(slots=True, eq=False)
class _Times:
    id: AttemptId  # that the gateway submitted: a group's where there are several choices
    submitted: float
    announced: float | None = None
    admitted: float | None = None
    ready: float | None = None
    moved: Moved = field(default_factory=Moved)
    told: bool = False


class AttemptTimes:
    """The times of attempts without a row."""

    def __init__(self) -> None:
        self._times: dict[AttemptId, _Times] = {}  # by attempt, and by each choice of a group

    def __len__(self) -> int:
        return len(self._times)

    def submitted(self, request: Request, now: float) -> None:
        """Notes that a request came."""
        times = _Times(request.id, now)
        for id in (request.id, *(branch.id for branch in request.branches)):
            self._times[id] = times

    def announced(self, id: AttemptId, now: float) -> None:
        """Notes that the producer announced blocks. The first time counts."""
        if (times := self._times.get(id)) is not None and times.announced is None:
            times.announced = now

    def admitted(self, id: AttemptId, now: float) -> None:
        """Notes that the engine gave an attempt its slots and blocks. The first time counts."""
        if (times := self._times.get(id)) is not None and times.admitted is None:
            times.admitted = now

    def ready(self, id: AttemptId, moved: Moved, now: float) -> None:
        """Notes that all blocks of a handoff are here, and how they came."""
        if (times := self._times.get(id)) is not None:
            times.ready, times.moved = now, moved

    def report_rows(self, rows: list[StepRows], frames: PendingFrames, now: float) -> None:
        """Reports the attempts whose first rows are among these, which leave now."""
        if not self._times:
            return
        for part in rows:
            for row in np.flatnonzero(part.cached >= 0).tolist():
                self.report(AttemptId(GatewayId(int(part.gateways[row])), int(part.handles[row])), frames, now)

    def report(self, id: AttemptId, frames: PendingFrames, now: float) -> None:
        """Reports an attempt, which has its first row or failed, and removes it. A group is reported once."""
        times = self._times.pop(id, None)
        if times is None or times.told:
            return
        times.told = True
        self._times.pop(times.id, None)

        def after(moment: float | None) -> float | None:
            return None if moment is None else moment - times.submitted

        timing = Timing(
            handle=times.id.handle,
            announced_s=after(times.announced),
            admitted_s=after(times.admitted),
            ready_s=after(times.ready),
            sent_s=now - times.submitted,
            moved=times.moved,
        )
        frames.add_timing(id.gateway, timing)

    def retain(self, open_ids: Container[AttemptId]) -> None:
        """Removes attempts that are over, and choices of groups that are."""
        self._times = {
            id: times
            for id, times in self._times.items()
            if id in open_ids or (times.id in open_ids and not times.told)
        }
