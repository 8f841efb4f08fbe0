"""Groups in a queue: their branches have no records of their own before the group has slots, but may be aborted."""

from collections.abc import Iterable

from kvtransfer.ids import AttemptId
from services.engine.sequences.request import Request


class QueuedGroups:
    """The branches of requests that are PARKED, WAITING or PREEMPTED."""

    def __init__(self) -> None:
        self._group_of: dict[AttemptId, Request] = {}  # by branch: its prompt's request

    def add(self, request: Request) -> None:
        """Adds the branches of a request that is queued."""
        for branch in request.branches:
            self._group_of[branch.id] = request

    def discard(self, request: Request) -> None:
        """Discards the branches of a request that is not queued any more."""
        for branch in request.branches:
            self._group_of.pop(branch.id, None)

    def ends_with(self, id: AttemptId) -> AttemptId:
        """Returns the request that ends with this one: the prompt of the only branch left, or the id itself."""
        group = self._group_of.get(id)
        return id if group is None or len(group.branches) > 1 else group.id

    def remove(self, id: AttemptId) -> None:
        """Takes a branch out of a group that has others. Unknown ids change nothing."""
        group = self._group_of.pop(id, None)
        if group is not None:
            group.branches = tuple(branch for branch in group.branches if branch.id != id)
            assert group.branches

    def check(self, queued: Iterable[Request]) -> None:
        """Asserts that these are the queued requests. Slow; for tests and for an idle worker."""
        expected = {branch.id: request for request in queued for branch in request.branches}
        assert self._group_of == expected, "branches of queued groups"
