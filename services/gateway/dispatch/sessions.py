"""The workers that served clients' sessions last: further requests of a session find their blocks there."""

from collections import OrderedDict

from kvtransfer.ids import WorkerId

_MAX_SESSIONS = 1 << 16

Session = tuple[str, str]  # tenant, and the name that its client gave the session


class Sessions:
    """Worker ids by session, for the sessions that were served most recently."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._workers: OrderedDict[Session, WorkerId] = OrderedDict()  # least recently served first

    def worker_of(self, session: Session) -> WorkerId | None:
        """The worker that served a session last, maybe gone by now; None: not known."""
        return self._workers.get(session)

    def note(self, session: Session, worker: WorkerId) -> None:
        """Notes that a session's request goes to a worker."""
        self._workers[session] = worker
        self._workers.move_to_end(session)
        if len(self._workers) > self._max_sessions:
            self._workers.popitem(last=False)
