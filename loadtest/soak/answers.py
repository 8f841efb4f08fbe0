"""Answers, whole or broken off: their texts and tokens, and whether these are right."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from loadtest.http_stream import Answer, HttpError, StatusError
from loadtest.soak.cases import Case

_CUT_CHARACTER = "\ufffd"  # an incomplete character at the end of a partial text


@dataclass(slots=True)
class Choice:
    """One choice, as far as it came. `tokens`: their texts, where logprobs were asked for."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Reading:
    """An answer as far as it came.

    whole: it came to its end in words, [DONE] or the end of its JSON.
    error: the words with which the server refused or ended it.
    times_s: when each chunk of a stream came.
    """

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    times_s: list[float] = field(default_factory=list)
    whole: bool = False
    error: str | None = None

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two chunks of a stream, in seconds."""
        return max((late - early for early, late in pairwise(self.times_s)), default=0.0)

    def is_wrong(self, case: Case, n: int, logprobs: bool) -> bool:
        """True for any text or token that the case's answer does not have; of a whole answer, for any that lacks."""
        if not self.whole or self.error is not None:
            return not all(_begins(choice, case, logprobs) for choice in self.choices.values())
        return sorted(self.choices) != list(range(n)) or any(
            (choice.text, choice.finish_reason) != (case.text, "length")
            or (logprobs and tuple(choice.tokens) != case.tokens)
            for choice in self.choices.values()
        )


def read(answer: Answer, stream: bool, reading: Reading) -> None:
    """Reads what came of an answer to a completion."""
    try:
        if stream:
            _read_stream(answer, reading)
        else:
            for choice in _json(answer.body())["choices"]:
                _add(reading, choice)
            reading.whole = True
    except StatusError as error:
        reading.whole, reading.error = True, f"{error.status} {_words(error.text)}"
    except HttpError:  # it broke off
        pass


def _read_stream(answer: Answer, reading: Reading) -> None:
    for came_s, event in _events(answer):
        if event is None:
            reading.whole = True
        elif "error" in event:
            reading.whole, reading.error = True, f"in the stream: {event['error']['message']}"
        else:
            reading.times_s.append(came_s)
            for choice in event["choices"]:
                _add(reading, choice)


def _events(answer: Answer) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """Yields the events of a stream, None for [DONE]. Raises HttpError."""
    for came_s, line in answer.lines():
        if line == b"data: [DONE]":
            yield came_s, None
        elif line.startswith(b"data: "):
            yield came_s, _json(line[len(b"data: ") :])


def _add(reading: Reading, choice: Mapping[str, Any]) -> None:
    one = reading.choices[choice["index"]]
    one.text += choice["text"]
    one.finish_reason = choice["finish_reason"] or one.finish_reason
    if choice.get("logprobs"):
        one.tokens += choice["logprobs"]["tokens"]


def _begins(choice: Choice, case: Case, logprobs: bool) -> bool:
    text_begins = case.text.startswith(choice.text.rstrip(_CUT_CHARACTER))
    return text_begins and (not logprobs or case.tokens[: len(choice.tokens)] == tuple(choice.tokens))


def _json(text: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise HttpError(f"the answer broke off: {error}") from error
    return value


def _words(text: str) -> str:
    try:
        return str(orjson.loads(text)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text[:100]
