"""Reads the parts, the tokens or the failure of an answer, when it is over."""

from typing import Any

import orjson

from loadtest.bench.endpoints import Endpoint
from loadtest.bench.outcome import Failure, FailureKind, Outcome
from loadtest.http_stream import Answer, HttpError

_DATA = b"data:"
_LONGEST_TEXT = 300  # of an error


def read(answer: Answer, outcome: Outcome, endpoint: Endpoint, *, wants_text: bool = False) -> None:
    """Notes in the outcome what an answer has; of a failure, when its last piece came."""
    outcome.connected_s = answer.connected_s
    try:
        outcome.text = "".join(_read_parts(answer, outcome, endpoint, wants_text))
    except HttpError as error:
        outcome.failure = Failure.of(error)
    if outcome.failure is None and not outcome.parts_s:
        outcome.failure = Failure(FailureKind.EMPTY, "the answer had no token")
    if outcome.failure is not None:
        outcome.parts_s = answer.times_s[-1:]


def _read_parts(answer: Answer, outcome: Outcome, endpoint: Endpoint, wants_text: bool) -> list[str]:
    """Reads the events of a stream, and returns their texts. Raises HttpError where it is none."""
    usage: Any = None
    texts: list[str] = []
    for came_s, line in answer.lines():
        if not line.startswith(_DATA) or (data := line[len(_DATA) :].strip()) == b"[DONE]":
            continue
        try:
            event = orjson.loads(data)
        except ValueError as error:
            raise HttpError(f"an event is no JSON: {data[:80]!r}") from error
        if not isinstance(event, dict) or event.get("error"):
            text = str(event.get("error") if isinstance(event, dict) else event)[:_LONGEST_TEXT]
            outcome.failure = Failure(FailureKind.IN_STREAM, f"error in the stream: {text}")
            return texts
        if choices := event.get("choices"):
            if outcome.parts_s or endpoint.has_token(choices[0]):
                outcome.parts_s.append(came_s)
            if wants_text:
                texts.append(endpoint.text(choices[0]))
        usage = event.get("usage") or usage
    _note_usage(usage, outcome)
    return texts


def _note_usage(usage: Any, outcome: Outcome) -> None:
    """Notes the numbers of tokens; of a server that does not say them, the parts count as tokens."""
    if usage and usage.get("completion_tokens"):
        outcome.output_tokens = usage["completion_tokens"]
        outcome.input_tokens = usage.get("prompt_tokens")
    else:
        outcome.output_tokens, outcome.has_usage = len(outcome.parts_s), False
