"""Calls of tools that a model writes as JSON, read while they come: the name, then pieces of the arguments."""

import json
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Self

from services.gateway.text.model_output.contents import placeholder

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SPACES = " \t\r\n"
_MAX_DEPTH = 64  # of brackets around a call's arguments and beside them
_SCALAR = re.compile(r"[-+.\w]")


class CallPart(NamedTuple):
    """The next part of a call. call: its number, from 0. name: in its first part; arguments: a piece of their JSON."""

    call: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """The places of a call in the JSON of its field.

    name: keys on the way to the name; empty: the pattern that opened the field has it.
    arguments: keys on the way to the arguments; empty: they are all of it.
    listed: the calls are the entries of one list; sequence: they are objects one after the other; either: there is one
    call, or a list of them, as its first bracket says.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)
    listed: bool = False
    sequence: bool = False
    either: bool = False


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    NEXT = auto()  # another call, or nothing


class _NotJson(Exception):
    """The text goes on in a way that JSON does not."""


class JsonCalls:
    """Reads the calls in one field.

    What has not the form of a call is text: all of the field where no call began in it. What follows the beginning of a
    call's arguments is part of them, whatever it is, until their brackets are closed. Where JSON ends after them, the
    rest of the field is dropped, and so are closing brackets after a call, and the fence of a block of code.
    """

    def __init__(self, layout: JsonLayout, first_call: int, name: str | None, known: frozenset[str] | None) -> None:
        """name: from the mark that opened the field. known: other names are no calls; None: any name is one."""
        self._layout = layout
        self._given_name = name
        self._known = known
        self._first_call = first_call
        self.call = first_call  # the next one's number
        self.rejected = False
        self._raw: list[str] = []  # the text since the last call ended
        self._containers: list[str] = []  # the brackets that are open
        self._keys: list[str | None] = []  # of the value that each of them has now
        self._expects = _Expects.VALUE
        self._string: list[str] | None = None  # the string or number that is being read
        self._scalar = False  # it has no quotes
        self._escaped = False
        self._name = name
        self._begun = False  # the call's first part has been returned
        self._early = ""  # arguments that came before the name
        self._depth = 0  # of brackets in the arguments; 0: not inside them
        self._quoted = False
        self._seen = False  # the call has arguments
        self._dropping = False  # the last call is whole, and nothing after it is read
        self._parts: list[CallPart | str] = []

    def feed(self, text: str) -> list[CallPart | str]:
        """Returns the parts of calls that the next text adds, and text that is none."""
        self._parts = []
        if self.rejected:
            return [text]
        if self._dropping:
            return []
        position = 0
        try:
            while position < len(text):
                position = self._next(text, position)
        except _NotJson:
            self._reject(text[position:])
        return self._parts

    def close(self, *, cut: bool = False) -> list[CallPart | str]:
        """Returns what is left when the field ends. A call that was cut has the arguments that came, and no more."""
        self._parts = []
        try:
            if self._string is not None and self._scalar and not self._depth:
                self._end_string()
        except _NotJson:
            self._reject("")
        if self._begun:
            self._begun = False
            self.call += 1
        elif not self.rejected and self._expects is not _Expects.NEXT:
            self._reject("")
        return self._parts

    def copied(self) -> Self:
        """Returns a reader that goes on by itself."""
        self._raw = ["".join(self._raw)]  # once for all copies
        if self._string is not None:
            self._string = ["".join(self._string)]
        other = copy(self)
        other._raw = [*self._raw]
        other._containers, other._keys = [*self._containers], [*self._keys]
        other._string = None if self._string is None else [*self._string]
        return other

    def _next(self, text: str, position: int) -> int:
        """Reads some of the text; returns where the rest begins. Raises _NotJson."""
        if self._depth:
            return self._read_arguments(text, position)
        if not self._begun:
            self._raw.append(text[position])
        if self._string is not None:
            return self._read_string(text, position)
        if text[position] in _SPACES:
            return position + 1
        return self._read_structure(text, position)

    def _read_structure(self, text: str, position: int) -> int:
        char = text[position]
        match self._expects:
            case _Expects.VALUE_OR_END if char == "]":
                self._end_container(char)
            case _Expects.VALUE | _Expects.VALUE_OR_END:
                self._begin_value(char)
            case _Expects.KEY | _Expects.KEY_OR_END if char == '"':
                self._string, self._scalar = [], False
            case _Expects.KEY_OR_END if char == "}":
                self._end_container(char)
            case _Expects.COLON if char == ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA_OR_END if char == ",":
                self._expects = _Expects.KEY if self._containers[-1] == "{" else _Expects.VALUE
            case _Expects.COMMA_OR_END if char in "}]":
                self._end_container(char)
            case _Expects.NEXT if char in "}]`" or (self._layout.sequence and char in ";,"):
                self._raw = []
            case _Expects.NEXT if self._layout.sequence and char == "{":
                self._begin_value(char)
            case _:
                raise _NotJson
        return position + 1

    def _begin_value(self, char: str) -> None:
        if self._layout.either and not self._containers:
            self._layout = replace(self._layout, listed=char == "[")
        if self._is_at(self._layout.arguments):
            if self._seen:
                raise _NotJson  # arguments twice
            if char in "{[":
                self._depth, self._seen = 1, True
                self._add(char)
                return
        if not self._containers and char != ("[" if self._layout.listed else "{"):
            raise _NotJson
        if char in "{[":
            if len(self._containers) == _MAX_DEPTH:
                raise _NotJson
            self._containers.append(char)
            self._keys.append(None)
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
        elif char == '"' or _SCALAR.match(char):
            self._string, self._scalar = ([], False) if char == '"' else ([char], True)
        else:
            raise _NotJson

    def _is_at(self, path: tuple[str, ...]) -> bool:
        """True when the value that comes now is the one at a path within its call."""
        if self._layout.listed and not self._containers:
            return False
        first = 1 if self._layout.listed else 0
        return len(self._keys) - first == len(path) and tuple(self._keys[first:]) == path

    def _read_string(self, text: str, position: int) -> int:
        assert self._string is not None
        char = text[position]
        if self._scalar and not _SCALAR.match(char):
            self._end_string()
            if self._raw:
                self._raw.pop()
            return position
        if not self._scalar and char == '"' and not self._escaped:
            self._end_string()
            return position + 1
        self._escaped = char == "\\" and not self._escaped
        self._string.append(char)
        return position + 1

    def _end_string(self) -> None:
        """Takes a string or number that is whole: a key, a name, arguments, or nothing of interest."""
        written, self._string = "".join(self._string or ()), None
        value = written if self._scalar else _decoded(written)
        if self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
            self._keys[-1] = value
            self._expects = _Expects.COLON
            return
        if self._layout.name and self._is_at(self._layout.name):
            if self._scalar:
                raise _NotJson
            self._name = value
            self._check_name()
            if self._early:
                early, self._early = self._early, ""
                self._add(early)
        elif self._is_at(self._layout.arguments):
            self._seen = True
            self._add("{}" if value == "null" else value)
        self._end_value()

    def _check_name(self) -> None:
        if not self._name or (self._known is not None and self._name not in self._known):
            raise _NotJson

    def _end_value(self) -> None:
        in_call = len(self._containers) > (1 if self._layout.listed else 0)
        if not in_call:
            self._end_call()
        self._expects = _Expects.COMMA_OR_END if self._containers else _Expects.NEXT

    def _end_container(self, char: str) -> None:
        if char != ("}" if self._containers.pop() == "{" else "]"):
            raise _NotJson
        self._keys.pop()
        listed_end = self._layout.listed and not self._containers
        if listed_end:
            if self.call == self._first_call:  # a list of no calls
                raise _NotJson
            self._expects = _Expects.NEXT
            self._raw = []
        else:
            self._end_value()

    def _end_call(self) -> None:
        if not self._seen:
            self._add("{}")
        if not self._begun:
            raise _NotJson
        self.call += 1
        self._begun = self._seen = False
        self._name, self._raw, self._early = self._given_name, [], ""

    def _read_arguments(self, text: str, position: int) -> int:
        """Finds the end of the arguments, or of the text."""
        if self._quoted and not self._escaped and self._begun and _IN_STRING.search(text, position) is None:
            self._add(text[position:])
            return len(text)
        begin, end = position, len(text)
        if self._escaped:
            self._escaped = False
            position += 1
        while found := (_IN_STRING if self._quoted else _STRUCTURE).search(text, position):
            position = found.end()
            match found.group():
                case "\\":
                    self._escaped = position == end
                    position += 1
                case '"':
                    self._quoted = not self._quoted
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth:
                end = position
                break
        if not self._begun:
            self._raw.append(text[begin:end])
        self._add(text[begin:end])
        if not self._depth:
            self._end_value()
        return end

    def _add(self, arguments: str) -> None:
        """Returns a piece of the arguments, after the first part of the call. Waits for the call's name."""
        if self._begun:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, CallPart) and last.name is None and last.call == self.call:
                self._parts[-1] = last._replace(arguments=last.arguments + arguments)
            else:
                self._parts.append(CallPart(self.call, None, arguments))
        elif self._name is None:
            self._early += arguments
        else:
            self._check_name()
            self._begun = True
            self._parts += [CallPart(self.call, self._name, ""), CallPart(self.call, None, arguments)]

    def _reject(self, rest: str) -> None:
        """Ends the reading: the rest is text, or dropped after the arguments of a call, which is whole then."""
        if self._begun:
            self._end_call()
            self._dropping, self._expects = True, _Expects.NEXT
            return
        self.rejected = True
        self._parts.append("".join(self._raw) + rest[1:] if self._raw else rest)


def _decoded(written: str) -> str:
    try:
        value = str(json.loads(f'"{written}"', strict=False))
        value.encode()  # fails for half a surrogate pair, which no answer can have
    except ValueError:
        raise _NotJson from None
    return value


def layout_of(shape: object, content: str, *, each: bool) -> JsonLayout | None:
    """Returns where calls are in a field of JSON with this transform; None: they are not read while they come."""
    if content not in ("json", "json-sequence", "json-calls") or not isinstance(shape, Mapping):
        return None
    sequence, either = content == "json-sequence", content == "json-calls"
    function = shape.get("function", shape)
    whole = placeholder(function)
    root = () if each else ("content",)
    if whole and whole[: len(root)] == root:
        inner = whole[len(root) :]
        return JsonLayout((*inner, "name"), (*inner, "arguments"), each, sequence, either)
    if not isinstance(function, Mapping):
        return None
    name, arguments = placeholder(function.get("name")), placeholder(function.get("arguments"))
    if not name or not arguments or arguments[: len(root)] != root:
        return None
    inside = name[: len(root)] == root and len(name) > len(root)
    return JsonLayout(name[len(root) :] if inside else (), arguments[len(root) :], each, sequence, either)
