"""The parts of an answer, and the interface of those who tell its text apart while it comes."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

from services.gateway.text.model_output.json_calls import CallPart

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the tool's name


class Told(NamedTuple):
    """The parts that some text of an answer adds to."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


NOTHING = Told()


def both(told: Told, more: Told) -> Told:
    """Returns what two texts add that follow each other."""
    return Told(told.content + more.content, told.reasoning + more.reasoning, told.calls + more.calls)


class Answer(Protocol):
    """The text of one choice, told apart while it comes.

    num_calls: calls of tools that are whole. reasoned: there is reasoning, or there was.
    """

    num_calls: int
    reasoned: bool

    @property
    def reasons(self) -> bool:
        """True while the text is the model's reasoning."""

    def copied(self) -> Self:
        """Returns an answer that goes on by itself from the text so far."""

    def feed(self, text: str) -> Told:
        """Returns what the next text adds."""

    def passes(self, text: str) -> bool:
        """Takes the next text where it is content and nothing else. The short form of `feed`, for streams."""

    def more(self, text: str) -> Told | None:
        """Takes the next text where all of it belongs to the part of the last one; None: it has to go to `feed`."""

    def finish(self, *, cut: bool = False) -> Told:
        """Returns what is left, after the last text. cut: more would have come."""
