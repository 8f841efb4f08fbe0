"""The places where the texts of a kept response's items were cut, so that its events can be made again.

As JSON, for each item: [lengths of the pieces in characters, [[number of a piece, number of its logprobs], ...]].
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import orjson

from services.gateway.openai.responses.output import ItemStatus, Kind, OutputItem


def pieces_of(items: Sequence[OutputItem]) -> bytes:
    """Returns the places as JSON."""
    return orjson.dumps([[[*map(len, item.pieces)], [*_counted(item.logprobs)]] for item in items])


def _counted(logprobs: Mapping[int, bytes]) -> Iterator[tuple[int, int]]:
    for number, entries in logprobs.items():
        yield number, len(orjson.loads(b"[%b]" % entries))


def cut_items(output: Sequence[Mapping[str, Any]], pieces: bytes) -> list[OutputItem]:
    """Returns the items of a kept response's `output`, cut as they were when they grew.

    Raises ValueError, KeyError, TypeError or IndexError for what `pieces_of` did not make.
    """
    return [
        _cut(index, item, *cuts) for index, (item, cuts) in enumerate(zip(output, orjson.loads(pieces), strict=True))
    ]


def _cut(
    index: int, listed: Mapping[str, Any], lengths: Sequence[int], counts: Sequence[tuple[int, int]]
) -> OutputItem:
    kind = Kind(listed["type"])
    item = OutputItem(kind, index, listed["id"], status=ItemStatus(listed["status"]))
    if kind.is_call:
        item.call_id, item.name, item.namespace = listed["call_id"], listed["name"], listed.get("namespace")
        text = listed[kind.text_field]
        entries: list[Any] = []
    else:
        part = listed["content"][0]
        text, entries = part["text"], part.get("logprobs", [])
    if sum(lengths) != len(text) or any(length < 0 for length in lengths):
        raise ValueError(f"the pieces of {listed['id']} do not make up its text")
    item.pieces = [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
    ends = pairwise(accumulate((count for _, count in counts), initial=0))
    for (number, _), (start, end) in zip(counts, ends, strict=True):
        item.logprobs[number] = orjson.dumps(entries[start:end])[1:-1]
    return item
