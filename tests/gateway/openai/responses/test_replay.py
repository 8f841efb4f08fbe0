"""The events that are made again of kept items are those that a stream had."""

from typing import Any

import orjson
import pytest

from services.gateway.api.answers.choice import Update
from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.output import ItemStatus, Output
from services.gateway.openai.responses.pieces import cut_items, pieces_of
from services.gateway.openai.responses.replay import Replay
from services.protocol.frames import TokenLogprobs
from tests.gateway.openai.responses.test_output import ENTRIES, EVERYTHING, RESPONSE, TOOLS, update

HEAD: dict[str, Any] = {
    "id": "resp_1",
    "status": "queued",
    "output": [],
    "usage": None,
    "completed_at": None,
    "error": None,
}
LOGPROBS = TokenLogprobs(-0.5, ((65, -0.5),))
WITH_LOGPROBS = [
    update("The "),
    update("")._replace(tokens=[5, 6], logprobs=[LOGPROBS, LOGPROBS]),
    update("s")._replace(logprobs=[LOGPROBS]),
]


def all_events(replay: Replay, response: dict[str, Any]) -> bytes:
    found = replay.taken()
    while replay.behind:
        found += replay.taken()
    return found + replay.end(response)


@pytest.mark.parametrize("updates", [EVERYTHING, WITH_LOGPROBS, [], [update("x")] * 700])
@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
def test_kept_items_and_growing_ones_have_the_events_of_a_stream(updates: list[Update], status: str):
    events = Events()
    output = Output(ENTRIES, events, RESPONSE, TOOLS)
    growing = Replay(HEAD, output.items, -1)
    told = b""
    for each in updates:
        output.take(each)
        told += growing.taken()
    output.close(ItemStatus.COMPLETED if status == "completed" else ItemStatus.INCOMPLETE)
    response: dict[str, Any] = {**HEAD, "status": status, "output": output.as_json()}
    told += all_events(growing, response)

    assert _without_numbers(events.taken()) in _without_numbers(told)  # in between the events of the response

    listed = orjson.loads(orjson.dumps(response))
    kept = cut_items(listed["output"], pieces_of(output.items))
    assert all_events(Replay(listed, kept, -1), listed) == told

    for after in (0, 2, 5, 300):
        blocks = told.split(b"\n\n")[:-1][after + 1 :]
        again = all_events(Replay(listed, kept, after), listed)
        if blocks or status != "failed":
            assert again == b"".join(block + b"\n\n" for block in blocks)
        else:
            assert again.endswith(b'"sequence_number":%d}\n\n' % (after + 1))  # the failure is told in any case


def _without_numbers(stream: bytes) -> bytes:
    return b"\n".join(block.partition(b',"sequence_number"')[0] for block in stream.split(b"\n\n"))
