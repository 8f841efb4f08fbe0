"""Which handles a worker has seen: tells a handle that is over from one that is still to come.

A gateway's commands reach a worker in the order of their handles, so the highest one seen decides: an unknown handle
up to it is over, one above it is still to come. The mark belongs to the gateway's id and outlives its
streams; were it kept per stream, a handle that was aborted on an old stream would look new on the next.
"""

from kvtransfer.ids import AttemptId, GatewayId


class HandleMarks:
    """The highest handle seen from each gateway."""

    def __init__(self) -> None:
        self._highest: dict[GatewayId, int] = {}

    def admit(self, id: AttemptId) -> bool:
        """Takes note of a submit. False: it was seen before or is over, and must be dropped."""
        if self.is_past(id):
            return False
        self._highest[id.gateway] = id.handle
        return True

    def raise_to(self, gateway: GatewayId, handle: int) -> None:
        """Everything unknown up to `handle` is over (a hello says what was allocated, an abort what was given up)."""
        self._highest[gateway] = max(handle, self._highest.get(gateway, 0))

    def is_past(self, id: AttemptId) -> bool:
        """True when this handle, if unknown, will never come."""
        return id.handle <= self._highest.get(id.gateway, 0)
