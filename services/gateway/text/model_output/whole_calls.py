"""Calls of tools in forms that are read when they are whole: by a template's transform, or as calls in Python."""

import re
from collections.abc import Mapping
from copy import copy
from typing import Any, Self

from services.gateway.text.model_output.argument_types import typed
from services.gateway.text.model_output.contents import (
    ContentError,
    as_json,
    python_call,
    read_content,
    reading,
    transformed,
)
from services.gateway.text.model_output.json_calls import CallPart

_PYTHON = re.compile(r"""["'\\()\[\]{}]""")


class WholeCalls:
    """Reads all calls of one field when the field ends. Text that has not their form is no call."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        first_call: int,
        names: Mapping[str, str],
        known: frozenset[str] | None,
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """names: groups of the pattern that opened the field. schemas: of the tools' parameters, by name."""
        self._spec = spec
        self.call = first_call
        self._names = names
        self._known = known
        self._schemas = schemas
        self.rejected = False
        self._text: list[str] = []

    def feed(self, text: str) -> list[CallPart | str]:
        """Keeps the text."""
        self._text.append(text)
        return []

    def close(self, *, cut: bool = False) -> list[CallPart | str]:
        """Returns the calls. cut: the answer was, in the last of them, whose arguments then lack their last bracket."""
        text, first = "".join(self._text), self.call
        try:
            with reading():
                calls = [_parts(first + number, *call) for number, call in enumerate(self._calls(text))]
        except ContentError:
            self.rejected = True
            return [text]
        self.call += len(calls)
        parts = [part for parts in calls for part in parts]
        return [*parts[:-1], _cut(parts[-1])] if cut and parts else [*parts]

    def copied(self) -> Self:
        """Returns a reader that goes on by itself."""
        self._text = ["".join(self._text)]  # once for all copies
        other = copy(self)
        other._text = [*self._text]
        return other

    def _calls(self, text: str) -> list[tuple[str, Any]]:
        spec = self._spec
        value = read_content(text, spec.get("content", "text"), spec.get("content_args", {}))
        if (shape := spec.get("transform")) is None:
            found = value
        elif spec.get("transform_each"):
            if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
                raise ContentError("it is no list of objects")
            found = [transformed(shape, {**self._names, **each}) for each in value]
        else:
            found = transformed(shape, {**self._names, "content": value})
        return [self._call(each) for each in (found if isinstance(found, list) else [found])]

    def _call(self, value: Any) -> tuple[str, Any]:
        function = value.get("function", value) if isinstance(value, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
            raise ContentError("it is no call of a tool")
        return name, typed(function.get("arguments", {}), self._schemas.get(name, {}))


class PythonCalls:
    """Reads calls in Python, `[f(a=1), g()]`, each when it is whole."""

    def __init__(self, first_call: int, known: frozenset[str] | None) -> None:
        """known: other names are no calls; None: any name is one."""
        self.call = first_call
        self._known = known
        self.rejected = False
        self._text = ""  # since the last call
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._ended = False

    def feed(self, text: str) -> list[CallPart | str]:
        """Returns the calls that the next text completes, and text that is none."""
        if self.rejected or self._ended:
            return [text]
        parts: list[CallPart | str] = []
        begin = 0
        for position, char in enumerate(text):
            if not self._escaped and _PYTHON.match(char) and self._ends_call(char):
                self._text += text[begin : position + 1]
                begin = position + 1
                if not self._take(parts):
                    break
        rest = text[begin:]
        if self.rejected or self._ended:
            return [*parts, rest] if rest else parts
        self._text += rest
        return parts

    def close(self, *, cut: bool = False) -> list[CallPart | str]:
        """Returns what is left when the field ends, which is no call, cut or not."""
        if self.rejected or self._ended or not self._text:
            return []
        self.rejected = True
        return [self._text]

    def copied(self) -> Self:
        """Returns a reader that goes on by itself."""
        return copy(self)

    def _ends_call(self, char: str) -> bool:
        """Follows brackets and quotes. True: a call ended, or all of them."""
        if char == "\\":
            self._escaped = bool(self._quote)
        elif self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        else:
            self._depth -= 1
            return self._depth == 0 or (char == ")" and self._depth == 1)
        return False

    def _take(self, parts: list[CallPart | str]) -> bool:
        """Reads the text so far. False: nothing after it is read."""
        text = self._text
        if self._depth == 0 and text.strip() == "]":
            self._text, self._ended = "", True
            return False
        try:
            name, arguments = python_call(text.strip().lstrip("[,"))
            if self._depth == 0 or (self._known is not None and name not in self._known):
                raise ContentError("it is no call of a tool")
            parts += _parts(self.call, name, arguments)
        except ContentError:
            self.rejected, self._text = True, ""
            parts.append(text)
            return False
        self.call, self._text = self.call + 1, ""
        return True


def _cut(part: CallPart) -> CallPart:
    return part._replace(arguments=part.arguments.removesuffix("}"))


def _parts(number: int, name: str, arguments: Any) -> list[CallPart]:
    """Returns the parts of a call. Raises ContentError where it cannot be sent."""
    written = arguments if isinstance(arguments, str) else as_json(arguments)
    as_json([name, written])
    return [CallPart(number, name, ""), CallPart(number, None, written)]
