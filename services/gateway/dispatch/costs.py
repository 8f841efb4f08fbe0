"""Learns what plans cost: how long prompts take to compute, what a handoff adds, how many cores two workers share.

Observations are plain numbers. Nothing here decides anything: the router reads `CostModel.figures`. Old observations
fade, so that the figures follow a change of load, of machines or of models.
"""

from dataclasses import dataclass, field

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.gateway.dispatch.router import Figures, Line

_MEMORY = 64  # observations until one has faded to 1/e
_LEAST = 2  # before a line is believed
_FAR = 4.0  # an observation counts for at most this multiple of what was expected: machines stall
_LONGEST_STEP_S = 2.0  # a longer time between two frames is a pause, not a step
_STEP_MEMORY = 32
_STEPS_NEEDED = 16  # beside a busy prefill worker, before the share of cores that the worker takes is believed
_MOST_SHARED = 0.9


class FadingLine:
    """A line y = base + slope * x, fitted by least squares to observations that fade. Base and slope are at least 0."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, x: float, y: float) -> None:
        """Adds an observation."""
        known = self.line()
        if known is not None:
            y = min(y, _FAR * max(known.at(x), 1e-3))
        keep = 1 - 1 / _MEMORY
        self._count += 1
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y

    def line(self) -> Line | None:
        """The fitted line, through the origin where all x are about the same; None: too few observations."""
        if self._count < _LEAST:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        if spread > 0.05 * mean_x**2:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
            base = mean_y - slope * mean_x
            if base >= 0:
                return Line(base, slope)
        return Line(0.0, self._xy / self._xx) if self._xx else Line(mean_y, 0.0)


@dataclass(slots=True)
class _Steps:
    """Durations of a decode worker's steps beside an idle prefill worker, by size of the batch in powers of two."""

    alone_s: dict[int, float] = field(default_factory=dict)
    last_at: float | None = None
    last_rows: int = 0


class CostModel:
    """Learns from times in seconds, all of one clock."""

    def __init__(self) -> None:
        self._prefill = FadingLine()
        self._alone = FadingLine()
        self._handoff = FadingLine()
        self._with_slot = {role: FadingLine() for role in WorkerRole}
        self._steps: dict[WorkerId, _Steps] = {}  # by decode worker
        self._slot_s: float | None = None
        self._finished_at: dict[WorkerId, float] = {}  # by decode worker whose queue is not empty
        self._shared = 0.0
        self._shared_steps = 0

    def note_first_token(self, role: WorkerRole, tokens: int, seconds: float, *, had_slot: bool = True) -> None:
        """Learns how long a worker computed until a prompt's first token; `tokens` includes those queued before it.

        had_slot: no sequence waited for a slot when the prompt was sent.
        """
        (self._prefill if role is WorkerRole.PREFILL else self._alone).note(tokens, seconds)
        if had_slot:
            self._with_slot[role].note(tokens, seconds)

    def note_handed_over(self, worker: WorkerId, tokens: int, seconds: float) -> None:
        """Learns how long the decode worker's first row came after the first token.

        tokens: fetched for it. A step's time is subtracted, since the second token takes one without a handoff too.
        """
        self._handoff.note(tokens, max(0.0, seconds - self._typical_step_s(worker)))

    def note_step(self, worker: WorkerId, rows: int, now: float, *, prefill_busy: bool, computes_too: bool) -> None:
        """Learns from the time of a decode worker's frame, with `rows` rows, how long its steps take.

        prefill_busy: a prefill worker of the same host has prompts to compute. computes_too: the decode worker itself
        has; nothing is learned from such a step.
        """
        steps = self._steps.setdefault(worker, _Steps())
        step_s = None if steps.last_at is None else now - steps.last_at
        size, same = rows.bit_length(), rows.bit_length() == steps.last_rows.bit_length()
        steps.last_at, steps.last_rows = (None, 0) if computes_too else (now, rows)
        if step_s is None or not same or step_s > _LONGEST_STEP_S:
            return
        if not prefill_busy:
            before = steps.alone_s.get(size, step_s)
            steps.alone_s[size] = before + (step_s - before) / _STEP_MEMORY
        elif (alone_s := steps.alone_s.get(size)) is not None:
            lost = min(max(1 - alone_s / max(step_s, 1e-6), 0.0), _MOST_SHARED)
            self._shared_steps += 1
            self._shared += (lost - self._shared) / min(self._shared_steps, _STEP_MEMORY)

    def note_finished(self, worker: WorkerId, count: int, now: float, *, others_wait: bool) -> None:
        """Learns from `count` sequences that finished how long the next one in the worker's queue waits for a slot."""
        if not others_wait:
            self._finished_at.pop(worker, None)
            return
        if count and (last := self._finished_at.get(worker)) is not None:
            slot_s = (now - last) / count
            before = slot_s if self._slot_s is None else min(slot_s, _FAR * self._slot_s)
            known = before if self._slot_s is None else self._slot_s
            self._slot_s = known + (before - known) / _STEP_MEMORY
        if count or worker not in self._finished_at:
            self._finished_at[worker] = now

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes what was learned of a worker that is gone."""
        self._steps.pop(worker, None)
        self._finished_at.pop(worker, None)

    def figures(self) -> Figures:
        """The figures as known by now."""
        shared = self._shared if self._shared_steps >= _STEPS_NEEDED else None
        return Figures(
            prefill=self._prefill.line(),
            alone=self._alone.line(),
            handoff=self._handoff.line(),
            shared=shared,
            first_at_prefill=self._with_slot[WorkerRole.PREFILL].line(),
            first_at_decode=self._with_slot[WorkerRole.DECODE].line(),
            slot_s=self._slot_s,
        )

    def _typical_step_s(self, worker: WorkerId) -> float:
        steps = self._steps.get(worker)
        if steps is None:
            return 0.0
        return steps.alone_s.get(steps.last_rows.bit_length(), 0.0)
