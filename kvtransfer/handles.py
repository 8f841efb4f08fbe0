"""The handles that a worker has seen: they tell an attempt that ended from one that is still to come.

A gateway's commands reach a worker in the order of their handles, so the highest one seen decides: an unknown handle
up to it belongs to an attempt that ended, one above it to an attempt still to come. The mark belongs to the gateway's
id and outlives its streams; were it kept per stream, a handle that was aborted on an old stream would look new on the
next.
"""

from kvtransfer.ids import AttemptId, GatewayId


class HandleMarks:
    """The highest handle seen from each gateway."""

    def __init__(self) -> None:
        self._highest: dict[GatewayId, int] = {}

    def admit(self, id: AttemptId) -> bool:
        """Notes a submit. Returns False for one that was seen before or has ended: it must be ignored."""
        if self.is_past(id):
            return False
        self._highest[id.gateway] = id.handle
        return True

    def raise_to(self, gateway: GatewayId, handle: int) -> None:
        """Notes that unknown attempts up to `handle` have ended: a hello names the highest handle, an abort its own."""
        self._highest[gateway] = max(handle, self._highest.get(gateway, 0))

    def is_past(self, id: AttemptId) -> bool:
        """Returns True when this handle, if unknown, will never come."""
        return id.handle <= self._highest.get(id.gateway, 0)
