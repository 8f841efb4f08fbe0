"""Splits what a model writes into the fields of a response template, while it comes.

Text is withheld only while it may still become a mark. How the text was cut into pieces changes nothing: the events of
a field joined are the same. A mark inside a string of a call is no mark, unless a line break is before it: JSON has
none in strings, so the string was never closed.
"""

import re
import string
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import regex

from services.gateway.text.model_output.template import Field, Mark, Part, ResponseTemplate

_CONTEXT = 64  # characters before a text that patterns may look at
_MAX_EMPTY = 2
_MAX_WITHHELD = 4096  # characters that may become a mark; longer ones do not
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBG]|\^")
_VISIBLE = re.compile(r"\S")

# The quotes of strings, by the content of a field of calls.
_QUOTES = {"json": '"', "json-sequence": '"', "json-calls": '"', "python-calls": "\"'"}
_OUTSIDE = {quotes: re.compile(f"[{quotes}]") for quotes in _QUOTES.values()}
_INSIDE = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
# In the place of a quote: before the text; in a text that is no JSON, where quotes are letters.
_BEGIN, _NO_STRINGS = "begin", "none"


class What(Enum):
    """The kind of an event."""

    OPENED = "opened"
    TEXT = "text"
    CLOSED = "closed"


class Event(NamedTuple):
    """An event of a field.

    text: of the field, or the mark that opened or closed it. names: groups of the pattern that opened it.
    """

    what: What
    field: Field
    text: str = ""
    names: dict[str, str] = {}  # noqa: RUF012, nobody changes it


class _Watch:
    """The marks that may come next, and the characters with which they begin."""

    def __init__(self, marks: Sequence[tuple[Mark, Field]]) -> None:
        self.marks = marks
        self.begins = _begins([mark for mark, _ in marks])
        self.begins_later = _begins([mark for mark, _ in marks if not mark.pattern.pattern.startswith(r"\A")])


def _begins(marks: Sequence[Mark]) -> "re.Pattern[str]":
    firsts = {each for mark in marks for each in _first_characters(mark)}
    plain = "".join(re.escape(each) for each in sorted(each for each in firsts if each))
    every = "" in firsts
    return re.compile("(?s:.)" if every else f"[{plain}]" if plain else r"(?!)")


class ParserTables:
    """The part that all parsers of one template share."""

    def __init__(self, template: ResponseTemplate) -> None:
        self.template = template
        self.other = template.other_text
        opening = [(field.open, field) for field in template.fields if field.open is not None]
        closing = [] if self.other is None or self.other.close is None else [(self.other.close, self.other)]
        self.between = _Watch([*opening, *closing])
        self.later = self.between  # after other text
        if any(field.leads for _, field in opening):
            self.later = _Watch([*((mark, field) for mark, field in opening if not field.leads), *closing])
        self.quotes = {field: _quotes(field) for _, field in opening}
        self.inside = {field: _Watch([(field.close, field)] if field.close else []) for _, field in opening}


def _quotes(field: Field) -> str:
    """Returns the quotes of strings in a field; empty: there are none, or others."""
    other = set(field.spec.get("content_args", {})) - {"known_names"}
    return "" if field.part is not Part.CALLS or other else _QUOTES.get(field.spec.get("content", "text"), "")


class ResponseParser:
    """Parses one answer. Must not be fed any more after `finish`."""

    def __init__(self, tables: ParserTables) -> None:
        self._tables = tables
        self._other = tables.other
        self._watch = self._between = tables.between
        self._leading = None if tables.later is tables.between else tables.between  # the watch until there is content
        self.field: Field | None = self._other  # which the next text belongs to; None: to none
        self._before = ""  # the last text before `_withheld`
        self._withheld = ""
        self._quotes = ""  # of strings in the field
        self._string = (_BEGIN, False)  # the quote of the string that the text is in, and whether a backslash was last

    def feed(self, text: str) -> list[Event]:
        """Returns what the next text adds."""
        if self.passes(text):
            return [] if self.field is None or not text else [Event(What.TEXT, self.field, text)]
        return self._events(self._withheld + text, whole=False)

    def passes(self, text: str) -> bool:
        """Takes the next text where all of it belongs to `field`, with nothing withheld before or after it."""
        if self._withheld:
            return False
        begins = self._watch.begins_later if self._before else self._watch.begins
        if begins.search(text) is not None:
            return False
        if self._watch is self._leading:
            self._leave_beginning(text)
        self._before = (self._before + text)[-_CONTEXT:]
        if self._quotes:
            self._string = self._followed(text, 0, len(text), self._string)
        return True

    def finish(self) -> list[Event]:
        """Returns what is left, after the answer's last text."""
        events = self._events(self._withheld, whole=True)
        if self.field is not None and self.field is not self._other:
            events.append(Event(What.CLOSED, self.field))
        return events

    def _events(self, rest: str, *, whole: bool) -> list[Event]:
        events: list[Event] = []
        num_empty = 0  # marks without a text, one after the other
        while True:
            found, safe = self._next_mark(rest, whole=whole)
            end = safe if found is None else found[0].start() - len(self._before)
            if num_empty > _MAX_EMPTY:  # they would be found here for ever
                found, end = None, min(1, len(rest))
            if end > 0 and self.field is not None:
                events.append(Event(What.TEXT, self.field, rest[:end]))
                if self._quotes:
                    self._string = self._followed(rest, 0, end, self._string)
            if self._leave_beginning(rest[:end]):
                self._pass(rest[:end])
                rest, num_empty = rest[end:], 0
                continue
            if found is None and (num_empty <= _MAX_EMPTY or not rest):
                self._pass(rest[:end])
                self._withheld = rest[end:]
                return events
            taken = end
            if found is not None:
                taken = found[0].end() - len(self._before)
                events.append(self._step(*found))
            num_empty = 0 if taken else num_empty + 1
            self._pass(rest[:taken])
            rest = rest[taken:]

    def _pass(self, text: str) -> None:
        self._before = (self._before + text)[-_CONTEXT:]

    def _leave_beginning(self, text: str) -> bool:
        """True when a text is the first outside of marked fields that is shown: other marks count after it."""
        if self._watch is not self._leading or self.field is None or not text.strip():
            return False
        self._watch = self._between = self._tables.later
        return True

    def _step(self, match: "regex.Match[str]", field: Field) -> Event:
        """Opens or closes a field."""
        self._string = (_BEGIN, False)
        if self.field is field:
            self.field, self._watch, self._quotes = self._other, self._between, ""
            return Event(What.CLOSED, field, match.group())
        self.field, self._watch, self._quotes = field, self._tables.inside[field], self._tables.quotes[field]
        names = {name: text for name, text in match.groupdict().items() if text is not None}
        return Event(What.OPENED, field, match.group(), names)

    def _next_mark(self, rest: str, *, whole: bool) -> tuple[tuple["regex.Match[str]", Field] | None, int]:
        """Returns the first mark that surely is one; and where what may still become one begins, in `rest`."""
        text, begin = self._before + rest, len(self._before)
        undecided = len(text)
        best: tuple[tuple[int, int, bool], regex.Match[str], Field] | None = None
        for mark, field in self._watch.marks:
            match = self._found(mark, text, begin, whole=whole)
            if match is None:
                continue
            if not whole and (match.partial or _may_grow(match, mark, len(text))):
                undecided = min(undecided, match.start())
                continue
            key = (match.start(), -len(match.group()), field is self.field)
            if best is None or key < best[0]:
                best = (key, match, field)
        if undecided < len(text) - _MAX_WITHHELD:
            undecided = len(text)
        if best is None or best[1].start() >= undecided:
            return None, undecided - begin
        return best[1:], undecided - begin

    def _found(self, mark: Mark, text: str, begin: int, *, whole: bool) -> "regex.Match[str] | None":
        """Returns the first match of a mark that is in no string."""
        match = mark.pattern.search(text, begin, partial=not whole)
        if not self._quotes:
            return match
        string = self._string
        while match is not None:
            string = self._followed(text, begin, match.start(), string)
            begin = match.start()
            if string[0] not in _INSIDE or text[begin - 1 : begin] == "\n":
                return match
            match = mark.pattern.search(text, begin + 1, partial=not whole) if begin < len(text) else None
        return None

    def _followed(self, text: str, begin: int, end: int, string: tuple[str, bool]) -> tuple[str, bool]:
        """Returns the string that the text is in at its end. string: at its beginning."""
        quote, escaped = string
        if quote == _BEGIN and (first := _VISIBLE.search(text, begin, end)) is not None:
            quote = "" if first.group() in "{[" else _NO_STRINGS
        while begin < end and quote not in (_BEGIN, _NO_STRINGS):
            if escaped:
                escaped, begin = False, begin + 1
                continue
            found = (_INSIDE[quote] if quote else _OUTSIDE[self._quotes]).search(text, begin, end)
            if found is None:
                break
            begin, char = found.end(), found.group()
            if char == "\\":
                escaped = True
            else:
                quote = "" if quote else char
        return quote, escaped


def _may_grow(match: "regex.Match[str]", mark: Mark, end: int) -> bool:
    if match.end() != end:
        return False
    return mark.may_grow or match.start() == match.end()


def _first_characters(mark: Mark) -> Iterable[str]:
    """Yields the characters with which a mark may begin; an empty text for any character."""
    if mark.literals:
        yield from (text[0] for text in mark.literals)
        return
    pattern = mark.pattern
    if pattern.match("") is not None or _LOOKS_BACK.search(pattern.pattern):
        yield ""
        return
    for each in string.printable:
        if pattern.match(each, partial=True) is not None:
            yield each
    if any(pattern.match(each, partial=True) is not None for each in "éЖ日｜"):
        yield ""
