"""An answer's text, told apart while it comes: content, reasoning, and calls of tools."""

from collections.abc import Mapping
from copy import copy
from typing import Protocol, Self

from services.gateway.text.model_output.json_calls import CallPart, JsonCalls, layout_of
from services.gateway.text.model_output.parser import Event, ParserTables, ResponseParser, What
from services.gateway.text.model_output.template import Field, Part
from services.gateway.text.model_output.told import NOTHING, Schemas, Told
from services.gateway.text.model_output.whole_calls import PythonCalls, WholeCalls


class _Calls(Protocol):
    call: int
    rejected: bool

    def feed(self, text: str) -> list[CallPart | str]: ...

    def close(self, *, cut: bool = False) -> list[CallPart | str]: ...

    def copied(self) -> Self: ...


class _Stripped:
    """Text without the white space at its beginning and its end."""

    def __init__(self, *, begun: bool = False, keeps_end: bool = False) -> None:
        """begun: white space at the beginning is kept. keeps_end: that at the end is never withheld."""
        self.begun = begun
        self._keeps_end = keeps_end
        self.spaces = ""
        self.shown = False  # some of the text is
        self._last = begun  # no other part of the answer came after the text so far

    def add(self, text: str) -> str:
        if self.passes(text):
            self.show()
            return text
        if not self.begun:
            text = text.lstrip()
            self.begun = bool(text)
        shown = text if self._keeps_end else text.rstrip()
        if not shown:
            self.spaces += text
            return ""
        spaces, self.spaces = self.spaces, text[len(shown) :]
        self.show()
        return spaces + shown

    def show(self) -> None:
        """Takes a text that is shown."""
        self.shown = self._last = True

    def strip(self) -> None:
        """Leaves out the white space before another part of the answer, and all of it where no text is shown yet."""
        self._last = False
        if not self.shown:
            self.begun, self.spaces = False, ""

    def finish(self) -> str:
        """Returns the white space with which the answer ends."""
        spaces, self.spaces = self.spaces, ""
        return spaces if self._last else ""

    def passes(self, text: str) -> bool:
        """True when a text is shown as it is."""
        return self.begun and not self.spaces and text != "" and (self._keeps_end or not text[-1].isspace())


class AnswerText:
    """See Answer."""

    def __init__(
        self, tables: ParserTables, prompt: str = "", schemas: Schemas | None = None, *, keeps_end: bool = False
    ) -> None:
        """prompt: what the prompt already has of the message. schemas: of the tools' parameters, by name.

        White space between the content and reasoning or a call is left out; that at the answer's end is kept.
        keeps_end: white space is shown at once, also before a call.
        """
        self._parser = ResponseParser(tables)
        self._schemas = schemas or {}
        self._content, self._reasoning = _Stripped(begun=True, keeps_end=keeps_end), _Stripped()
        self._calls: _Calls | None = None
        self._opening = ""  # the mark before the calls, until the first of them or a text that is none
        self._any_call = False  # in the field of calls that is open
        self._told: list[tuple[Part, str] | CallPart] = []
        self.num_calls = 0  # that are whole
        self.reasoned = False  # there is reasoning, or there was
        if prompt:
            self.feed(prompt)
            self._content.spaces = self._reasoning.spaces = ""
            self._told = []

    def copied(self) -> Self:
        """See Answer."""
        other = copy(self)
        other._parser, other._content, other._reasoning = copy(self._parser), copy(self._content), copy(self._reasoning)
        other._calls = None if self._calls is None else self._calls.copied()
        return other

    @property
    def reasons(self) -> bool:
        """See Answer."""
        return self._parser.field is not None and self._parser.field.part is Part.REASONING

    def feed(self, text: str) -> Told:
        """See Answer."""
        if (told := self.more(text)) is not None:
            return told
        for event in self._parser.feed(text):
            self._take(event)
        return self._sum()

    def passes(self, text: str) -> bool:
        """See Answer."""
        field = self._parser.field
        if field is None or field.part is not Part.CONTENT or not self._content.passes(text):
            return False
        if not self._parser.passes(text):
            return False
        self._content.show()
        return True

    def more(self, text: str) -> Told | None:
        """See Answer."""
        self._told = []
        return self._more(text) if self._parser.passes(text) else None

    def _more(self, text: str) -> Told:
        """Takes a text that all belongs to the field of the last one."""
        field = self._parser.field
        if field is None:
            return NOTHING
        if field.part is Part.CONTENT:
            return Told(self._content.add(text))
        if field.part is Part.REASONING:
            return Told("", self._reasoning.add(text))
        if self._calls is None:
            return NOTHING
        parts = self._calls.feed(text)
        if len(parts) == 1 and isinstance(parts[0], CallPart) and parts[0].name is None:
            self.num_calls = self._calls.call
            return Told("", "", (parts[0],))
        self._add(self._calls, parts)
        return self._sum()

    def finish(self, *, cut: bool = False) -> Told:
        """See Answer."""
        self._told = []
        for event in self._parser.finish():
            self._take(event, cut=cut)
        told = self._sum()
        return told._replace(content=told.content + self._content.finish())

    def _take(self, event: Event, *, cut: bool = False) -> None:
        if event.field.part is Part.CALLS:
            self._take_calls(event, cut=cut)
        elif event.what is What.TEXT:
            self._told.append((event.field.part, event.text))
        elif event.field.part is Part.REASONING:
            self.reasoned = True
            self._told.append((Part.REASONING, ""))

    def _take_calls(self, event: Event, *, cut: bool) -> None:
        if event.what is What.OPENED:
            self._calls, self._opening, self._any_call = self._reader(event), event.text, False
        elif event.what is What.TEXT and self._calls is not None:
            self._add(self._calls, self._calls.feed(event.text))
        elif self._calls is not None:
            self._add(self._calls, self._calls.close(cut=cut))
            if self._calls.rejected and not self._any_call:
                self._told.append((Part.CONTENT, event.text))
            self.num_calls, self._calls = self._calls.call, None

    def _add(self, reader: _Calls, parts: list[CallPart | str]) -> None:
        for part in parts:
            if isinstance(part, CallPart):
                self._told.append(part)
                self._any_call = True
            else:
                self._told.append((Part.CONTENT, self._opening + part))
            self._opening = ""
        self.num_calls = reader.call

    def _reader(self, event: Event) -> _Calls:
        spec, number = event.field.spec, self.num_calls
        content, known = spec.get("content", "text"), None
        if spec.get("content_args", {}).get("known_names"):
            known = frozenset(self._schemas)
        if content == "python-calls":
            return PythonCalls(number, known)
        name = event.names.get(_name_group(event.field))
        layout = layout_of(spec.get("transform"), content, each=bool(spec.get("transform_each")))
        dialect = set(spec.get("content_args", {})) - {"known_names"}
        if layout is not None and not dialect and (layout.name or name):
            return JsonCalls(layout, number, name if not layout.name else None, known)
        return WholeCalls(spec, number, event.names, known, self._schemas)

    def _sum(self) -> Told:
        content = reasoning = ""
        calls: list[CallPart] = []
        for each in self._told:
            if isinstance(each, CallPart):
                self._content.strip()
                calls.append(each)
            elif each[0] is Part.REASONING:
                self._content.strip()
                reasoning += self._reasoning.add(each[1])
            else:
                content += self._content.add(each[1])
        return Told(content, reasoning, tuple(calls))


def _name_group(field: Field) -> str:
    """The group of the opening pattern that has the name of the tool."""
    shape = field.spec.get("transform")
    function = shape.get("function", shape) if isinstance(shape, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name.strip("{}") if isinstance(name, str) else ""
