"""The store by which Gloo's ranks on several hosts find each other: every rank has all entries, and tells its own."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

_MOST_S = 60.0  # for the entries of other ranks, which are told within a moment once all of them join


class SharedStore(Store):  # type: ignore[misc]  # torch has no types for it
    """A rank's copy of the store. torch's own over TCP knows no TLS, and opens a port of its own."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        """tell: is called with each entry that this rank sets."""
        super().__init__()
        self._tell = tell
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Takes an entry of another rank. Any thread."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Sets an entry, and tells the other ranks."""
        data = value.encode() if isinstance(value, str) else value
        self.put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Returns an entry when it is there. Raises RuntimeError where it does not come."""
        self._wait([key], _MOST_S)
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all of these entries are there. Raises RuntimeError where one does not come."""
        self._wait(keys, _MOST_S if timeout is None else timeout.total_seconds())

    def _wait(self, keys: Sequence[str], most_s: float) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: all(key in self._entries for key in keys), most_s)
        if not came:
            raise RuntimeError(f"the other ranks did not come within {most_s:g} s")
