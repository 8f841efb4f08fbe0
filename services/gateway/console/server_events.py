"""Server-sent events of the feed, as bytes: made once, and written to all listeners."""

from collections.abc import Sequence

import orjson

ROWS_AT_ONCE = 500


def event(name: str, data: object) -> bytes:
    """Returns one event. data: what orjson knows, fragments of JSON among it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def json_list(parts: Sequence[bytes]) -> orjson.Fragment:
    """Returns a list of what is JSON already, as a part of larger JSON."""
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def rows_events(rows: Sequence[bytes]) -> list[bytes]:
    """Returns the events with these rows, a bounded number of them in each."""
    parts = (rows[first : first + ROWS_AT_ONCE] for first in range(0, len(rows), ROWS_AT_ONCE))
    return [b'event: requests\ndata: {"rows":[%b]}\n\n' % b",".join(part) for part in parts]
