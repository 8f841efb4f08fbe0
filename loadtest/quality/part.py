"""One part of a quality run: what a server is asked, and what the answers of two servers say side by side."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from loadtest.quality.asked import AskedServer
from loadtest.quality.lines import Line

Answers = TypeVar("Answers")


class Part(Protocol[Answers]):
    """A measure, or several of the same answers."""

    @property
    def name(self) -> str:
        """The name, for the table and the options."""

    async def ask(self, server: AskedServer) -> Answers:
        """Returns the answers of one server. Raises HttpError, and Skipped where it cannot be asked for them."""

    def compare(self, a: Answers, b: Answers) -> Sequence[Line]:
        """Makes the lines of two servers' answers. Raises Skipped where they cannot be compared."""
