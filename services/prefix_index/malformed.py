"""Entries in Redis that no worker writes: another program's, or bytes that were damaged. They are skipped."""

import structlog

_SHOWN = 100  # characters of an entry

log = structlog.get_logger()


class MalformedEntries:
    """Counts malformed entries, and logs the first one."""

    def __init__(self) -> None:
        self.count = 0

    def skipped(self, kind: str, entry: bytes | str, why: str) -> None:
        """Counts an entry of one kind that was skipped."""
        if not self.count:
            shown = repr(entry)[:_SHOWN]
            log.warning("Redis has entries that no worker writes; they are skipped", kind=kind, entry=shown, reason=why)
        self.count += 1
