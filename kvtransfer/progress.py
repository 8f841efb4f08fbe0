"""Progress of handoffs, as a consumer sees it: which reads stand still, which producers are silent, whom to avoid.

Time is that of a clock which goes only while this worker looks at it. A machine that was stopped for a minute, or a
step that took one, does not make a read older by a minute, of which nobody has had the time to see the end.

A read stands still when it has been open for longer than four times what its bytes, and all others that were open
beside it, take at the rate of earlier reads from its producer, and some seconds more. Its producer is then avoided,
first for 5 s and twice as long after each further stall. When that time is over one handoff is the trial: until it
ends, no other is asked for. A read that was posted after the stall and moves its blocks ends the matter.

What a producer announces waits for its engine, whose steps may take long, and for others' prompts before this one. So
the bound of an announcement is not one of time: a producer counts as getting on as long as it is heard, be it by a
pulse, which says nothing of its engine. One that is not heard for 3 s is avoided until it is heard again, and one that
is not heard for 10 s is stalled.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from kvtransfer.ids import AttemptId, WorkerId


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """read_s: beyond the time that its bytes take, how long a read may be open. first_read_s: for the first reads from
    a producer, which connect to it. slack: how many times longer than before the bytes may take.
    """

    read_s: float = 5.0
    first_read_s: float = 15.0
    slack: float = 4.0
    first_bytes_per_s: float = 5e7  # the rate of a producer from which nothing of size has been read
    least_bytes: int = 1 << 20  # the time of smaller reads is latency, and says nothing of the rate
    avoid_s: float = 5.0  # after the first stall
    max_avoid_s: float = 60.0
    silent_s: float = 3.0  # a producer that is not heard for so long is avoided
    stalled_s: float = 10.0  # a producer that is not heard for so long is stalled
    longest_look_s: float = 1.0  # between two looks at the clock: what passed beyond it does not count


_REMEMBERED_S = 600.0  # how long a stall counts when nobody tries its producer again
_KEPT = 0.8  # of the weight of earlier reads in the rate, with each further one


@dataclass(slots=True)
class _Pace:
    """The reads of one producer."""

    open_blocks: int = 0
    num_ended: int = 0  # that moved their blocks
    moved_bytes: float = 0.0  # by reads of some size, the last ones weighted most
    took_s: float = 0.0  # these reads, with the same weights


@dataclass(slots=True)
class _TimedRead:
    pace: _Pace
    producer: WorkerId
    num_blocks: int
    posted: float
    most_beside: int  # blocks in open reads of this producer at one time, this read's among them


@dataclass(slots=True)
class _Stall:
    """A producer of which a read stood still."""

    since: float
    until: float
    avoid_s: float  # the last time that it was avoided for
    trial: AttemptId | None = None  # the handoff that tries it again


@dataclass(slots=True)
class Progress:
    """All reads of a consumer, and the producers that it avoids."""

    limits: ProgressLimits
    block_bytes: int
    _awake_s: float = 0.0  # the clock
    _looked: float | None = None  # at the caller's clock
    _paces: dict[WorkerId, _Pace] = field(default_factory=dict)
    _reads: dict[int, _TimedRead] = field(default_factory=dict)  # open ones, also those that were abandoned
    _stalls: dict[WorkerId, _Stall] = field(default_factory=dict)
    _heard: dict[WorkerId, float] = field(default_factory=dict)  # by connected producer that sends pulses: when

    def look(self, now: float) -> None:
        """Moves the clock."""
        if self._looked is not None:
            self._awake_s += min(max(0.0, now - self._looked), self.limits.longest_look_s)
        self._looked = now

    # Reads.

    def read_posted(self, read_id: int, producer: WorkerId, num_blocks: int) -> None:
        """Begins to time a read."""
        pace = self._paces.setdefault(producer, _Pace())
        pace.open_blocks += num_blocks
        self._reads[read_id] = _TimedRead(pace, producer, num_blocks, self._awake_s, pace.open_blocks)
        for read in self._reads.values():
            if read.pace is pace:
                read.most_beside = max(read.most_beside, pace.open_blocks)

    def read_ended(self, read_id: int, *, moved: bool, wanted: bool) -> None:
        """Learns the rate from a read that ended. moved: its blocks came; wanted: its handoff waited for them."""
        read = self._reads.pop(read_id)
        pace = read.pace
        pace.open_blocks -= read.num_blocks
        if not moved:
            return
        pace.num_ended += 1
        num_bytes = read.num_blocks * self.block_bytes
        if num_bytes >= self.limits.least_bytes:
            pace.moved_bytes = pace.moved_bytes * _KEPT + num_bytes
            pace.took_s = pace.took_s * _KEPT + self._awake_s - read.posted
        stall = self._stalls.get(read.producer)
        if wanted and stall is not None and read.posted >= stall.since:
            del self._stalls[read.producer]

    def stands_still(self, read_id: int) -> bool:
        """Returns True when a read has been open for longer than its bound."""
        read = self._reads[read_id]
        return self._awake_s - read.posted > self._bound_s(read)

    def _bound_s(self, read: _TimedRead) -> float:
        limits, pace = self.limits, read.pace
        expected_s = read.most_beside * self.block_bytes / self._bytes_per_s(pace)
        return limits.slack * expected_s + (limits.read_s if pace.num_ended else limits.first_read_s)

    def _bytes_per_s(self, pace: _Pace) -> float:
        if not pace.moved_bytes:
            return self.limits.first_bytes_per_s
        return pace.moved_bytes / max(pace.took_s, 1e-3)

    # Producers.

    def submitted(self, id: AttemptId, producer: WorkerId, open_ids: Container[AttemptId]) -> None:
        """Makes a handoff the trial of a producer that has been avoided for long enough."""
        stall = self._stalls.get(producer)
        if stall is not None and self._awake_s >= stall.until and stall.trial not in open_ids:
            stall.trial = id

    def stalled(self, producer: WorkerId) -> None:
        """Avoids a producer of which something stood still, or which cannot be reached; each time for longer.

        The rate that was learned may be what is wrong: where it was a high one, reads that follow may take longer.
        """
        limits, pace = self.limits, self._paces.get(producer)
        if pace is not None and self._bytes_per_s(pace) > limits.first_bytes_per_s:
            pace.moved_bytes = pace.took_s = 0.0
        oldest = self._awake_s - _REMEMBERED_S
        self._stalls = {producer: stall for producer, stall in self._stalls.items() if stall.until > oldest}
        stall = self._stalls.get(producer)
        if stall is None:
            self._stalls[producer] = _Stall(self._awake_s, self._awake_s + limits.avoid_s, limits.avoid_s)
        elif self._awake_s >= stall.until:
            stall.avoid_s = min(limits.max_avoid_s, 2 * stall.avoid_s)
            stall.since, stall.until = self._awake_s, self._awake_s + stall.avoid_s

    def heard(self, producer: WorkerId) -> None:
        """Notes a message of a connected producer that sends pulses."""
        self._heard[producer] = self._awake_s

    def unheard(self, producer: WorkerId) -> None:
        """Notes that a producer is not connected, or sends no pulses: its silence says nothing."""
        self._heard.pop(producer, None)

    def is_stalled(self, producer: WorkerId) -> bool:
        """Returns True where nothing can be expected of a producer: it is silent, though it is connected."""
        heard = self._heard.get(producer)
        return heard is not None and self._awake_s - heard > self.limits.stalled_s

    def avoided(self, open_ids: Container[AttemptId]) -> set[WorkerId]:
        """Finds the producers that are avoided now. open_ids: the handoffs under way."""
        silent = {producer for producer, at in self._heard.items() if self._awake_s - at > self.limits.silent_s}
        return silent | {
            producer
            for producer, stall in self._stalls.items()
            if self._awake_s < stall.until or stall.trial in open_ids
        }

    def producer_lost(self, producer: WorkerId) -> None:
        """Removes what is known of the pace of a producer that cannot be reached. Its open reads go on."""
        self._paces.pop(producer, None)
        self._heard.pop(producer, None)
