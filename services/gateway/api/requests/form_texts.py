"""The texts by which a request describes a form of its answer: their limits, and the style of JSON."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

MAX_CHARS = 1 << 16  # of a schema as JSON, a regular expression, a grammar, all choices together, structural tags
MAX_CHOICES = 1024

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The style in which JSON is written.

    Without a pattern it is compact, with a space after commas and colons. Small models that may write any white space
    often write nothing else any more.

    whitespace: a regular expression of what may stand wherever JSON allows white space; None: `spaces` says it.
    spaces: False: no white space at all.
    closed: objects have no properties that their schema does not name, unless it says so itself.
    """

    whitespace: str | None = None
    spaces: bool = True
    closed: bool = False

    def overrides(self) -> dict[str, Any]:
        """Returns llguidance's options."""
        if self.whitespace is not None:
            return {"whitespace_pattern": self.whitespace, "item_separator": ",", "key_separator": ":"}
        space = " " if self.spaces else ""
        return {"whitespace_flexible": False, "item_separator": "," + space, "key_separator": ":" + space}
