"""JSON of large bodies, read in slices of which none keeps the interpreter lock for more than a millisecond.

A library reads a body in one call, and no other thread runs meanwhile: of 8 MiB, 2,800,000 empty objects took orjson
160 ms, 700,000 fields 250 ms, 1,400,000 token ids 60 ms. Here a thread beside the event loop reads the structure, and
orjson reads strings and runs of numbers of at most 64 KiB. The values are those that orjson would return. Beyond that,
the number of values is limited while they are read: they take time after they are read, too.
"""

import re
from typing import Any

import orjson

from services.gateway.api.errors import invalid

MAX_VALUES = 1 << 16  # objects, arrays, strings and single values
MAX_NUMBERS = 1 << 20  # in arrays of numbers: token ids

_SMALL_BYTES = 16 << 10  # take less than 2 ms in one call, whatever they hold
_PLAIN_BYTES = 256 << 10  # too, with few values
_FEW_COMMAS = 1024
_SLICE = 64 << 10
_MAX_DEPTH = 64

_SPACE = re.compile(rb"[ \t\n\r]{0,%d}" % _SLICE)
_SCALAR = re.compile(rb"[-+.0-9a-zA-Z]{1,400}")
_NUMBERS = re.compile(rb"[-+.0-9eE \t\n\r,]{1,%d}" % _SLICE)
# At most 64 KiB of a string, with whole escapes and pairs of them.
_PIECE = re.compile(
    rb'(?:[^"\\]{1,64}+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u]){1,1024}+'
)
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY, _QUOTE, _COLON, _COMMA = b'{}[]":,'
_NUMBER_STARTS = frozenset(b"-0123456789")


class JsonError(ValueError):
    """The bytes are no JSON in UTF-8, or are nested too deeply."""


def takes_long(body: bytes) -> bool:
    """True for a body that could hold the interpreter lock for more than 2 ms if it was read in one call."""
    if len(body) <= _SMALL_BYTES:
        return False
    return len(body) > _PLAIN_BYTES or body.count(b",") > _FEW_COMMAS


def read_large(body: bytes) -> Any:
    """Returns the value of a JSON text. Raises JsonError, and ApiError for too many values."""
    try:
        return _Reader(body).document()
    except orjson.JSONDecodeError as error:
        raise JsonError(str(error)) from error


class _Reader:
    """Reads one text from its beginning to its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0
        self._num_values = 0
        self._num_numbers = 0

    def document(self) -> Any:
        """Returns the value of the whole text."""
        value = self._value(self._next(), 0)
        if self._next() is not None:
            raise JsonError("there is more after the value")
        return value

    def _next(self) -> int | None:
        """Skips white space, and returns the byte after it; None: the text is over."""
        while (space := _SPACE.match(self._body, self._at)) and space[0]:
            self._at = space.end()
        return self._body[self._at] if self._at < len(self._body) else None

    def _value(self, first: int | None, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _too_many(MAX_VALUES, "values")
        if first == _QUOTE:
            return self._string()
        if first not in (_OPEN_OBJECT, _OPEN_ARRAY):
            return self._scalar()
        if depth == _MAX_DEPTH:
            raise JsonError("it is nested too deeply")
        self._at += 1
        return self._object(depth + 1) if first == _OPEN_OBJECT else self._array(depth + 1)

    def _scalar(self) -> Any:
        found = _SCALAR.match(self._body, self._at)
        if found is None:
            raise JsonError(f"no value at byte {self._at}")
        self._at = found.end()
        return orjson.loads(found[0])

    def _object(self, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._ends(_CLOSE_OBJECT):
            return fields
        while True:
            if self._next() != _QUOTE:
                raise JsonError(f"no name at byte {self._at}")
            name = self._string()
            if self._next() != _COLON:
                raise JsonError(f"no colon at byte {self._at}")
            self._at += 1
            fields[name] = self._value(self._next(), depth)
            if self._ends(_CLOSE_OBJECT):
                return fields
            self._skip_comma()

    def _array(self, depth: int) -> list[Any]:
        entries: list[Any] = []
        if self._ends(_CLOSE_ARRAY):
            return entries
        while True:
            first = self._next()
            if first in _NUMBER_STARTS:
                entries += self._numbers()
            else:
                entries.append(self._value(first, depth))
            if self._ends(_CLOSE_ARRAY):
                return entries
            self._skip_comma()

    def _ends(self, closing: int) -> bool:
        if self._next() != closing:
            return False
        self._at += 1
        return True

    def _skip_comma(self) -> None:
        if self._next() != _COMMA:
            raise JsonError(f"no comma at byte {self._at}")
        self._at += 1

    def _numbers(self) -> list[Any]:
        """Reads numbers up to the end of a slice or of their run. A comma after the last one is left."""
        found = _NUMBERS.match(self._body, self._at)
        assert found is not None
        run = found[0] if len(found[0]) < _SLICE else found[0][: found[0].rfind(b",") + 1]
        if not run:  # a number and very much white space
            return [self._scalar()]
        run = run.rstrip(b" \t\n\r").removesuffix(b",")
        numbers: list[Any] = orjson.loads(b"[%b]" % run)
        self._at += len(run)
        self._num_numbers += len(numbers)
        if self._num_numbers > MAX_NUMBERS:
            raise _too_many(MAX_NUMBERS, "numbers")
        return numbers

    def _string(self) -> str:
        pieces = []
        self._at += 1
        while self._body[self._at : self._at + 1] != b'"':
            found = _PIECE.match(self._body, self._at)
            end = self._at if found is None else self._before_next_character(found.end())
            if end == self._at:
                raise JsonError(f"no text, or no end of it, at byte {self._at}")
            pieces.append(orjson.loads(b'"%b"' % self._body[self._at : end]))
            self._at = end
        self._at += 1
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def _before_next_character(self, end: int) -> int:
        """Moves the end of a piece to the beginning of the character in UTF-8 that it would cut."""
        while self._at < end < len(self._body) and self._body[end] & 0xC0 == 0x80:
            end -= 1
        return end


def _too_many(limit: int, what: str) -> Exception:
    return invalid(f"The body has more than {limit} {what}.", None)
