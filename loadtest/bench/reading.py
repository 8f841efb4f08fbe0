"""Reads the parts, the tokens or the failure of an answer, when it is over."""

from collections.abc import Mapping
from typing import Any

import orjson

from loadtest.bench.endpoints import Endpoint, object_of, objects_of
from loadtest.bench.outcome import Failure, FailureKind, Outcome
from loadtest.http_stream import Answer, HttpError

_DATA = b"data:"
_LONGEST_TEXT = 300  # of an error


def read(answer: Answer, outcome: Outcome, endpoint: Endpoint, *, wants_text: bool = False) -> None:
    """Notes in the outcome what an answer has; of a failure, when its first part came and when it ended.

    An outcome that has failed already keeps its failure: its answer is what came before.
    """
    outcome.connected_s = answer.connected_s
    failure = outcome.failure
    try:
        outcome.text = "".join(_read_parts(answer, outcome, endpoint, wants_text))
    except HttpError as error:
        outcome.failure = Failure.of(error)
    if outcome.failure is None and not outcome.parts_s:
        outcome.failure = Failure(FailureKind.EMPTY, "the answer had no token")
    outcome.failure = failure or outcome.failure
    if outcome.failure is not None:
        outcome.parts_s = [*outcome.parts_s[:1], outcome.ended_s]


def _read_parts(answer: Answer, outcome: Outcome, endpoint: Endpoint, wants_text: bool) -> list[str]:
    """Reads the events of a stream, and returns their texts. Raises HttpError where it is none."""
    usage: Mapping[str, Any] = {}
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
        if choices := objects_of(event.get("choices"), "choices"):
            if outcome.parts_s or endpoint.has_token(choices[0]):
                outcome.parts_s.append(came_s)
            if wants_text:
                texts.append(endpoint.text(choices[0]))
        usage = object_of(event.get("usage"), "usage") or usage
    _note_usage(usage, outcome)
    return texts


def _note_usage(usage: Mapping[str, Any], outcome: Outcome) -> None:
    """Notes the numbers of tokens; of a server that does not say them, the parts count as tokens. Raises HttpError."""
    output_tokens, input_tokens = (_count(usage, name) for name in ("completion_tokens", "prompt_tokens"))
    if output_tokens:
        outcome.output_tokens, outcome.input_tokens = output_tokens, input_tokens
    else:
        outcome.output_tokens, outcome.has_usage = len(outcome.parts_s), False


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise HttpError(f"{name} of an answer is no number of tokens: {str(count)[:_LONGEST_TEXT]}")
    return count
