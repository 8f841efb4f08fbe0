"""The lease: the right to a producer's blocks, which is the gateway's at first and then a consumer's.

A lease belongs to the control stream on which the handoff was last opened; before the first open, to the gateway. It
lasts while that stream lives, a grace longer when it breaks, and never beyond the request's deadline. Nothing renews
it.
"""

from dataclasses import dataclass

from kvtransfer.ids import StreamId


@dataclass(slots=True)
class Lease:
    """One handoff's lease. Times are those of one monotonic clock, in seconds."""

    deadline: float
    holder: StreamId | None = None  # None: the gateway
    broken_until: float | None = None  # the end of its grace, once the holder's stream broke

    def take(self, stream: StreamId) -> None:
        """Gives the lease to the stream of a consumer that opens the handoff, or opens it again on a newer stream."""
        self.holder = stream
        self.broken_until = None

    def break_stream(self, stream: StreamId, until: float) -> None:
        """Starts the grace of a stream that broke. No change where the lease belongs to another stream by now."""
        if self.holder == stream and self.broken_until is None:
            self.broken_until = until

    @property
    def live_holder(self) -> StreamId | None:
        """The stream to talk to, if there is one."""
        return self.holder if self.broken_until is None else None
