"""The input of a custom tool, which its model writes as the one string in an object, read while it comes."""

import json

import regex

_OPENING = regex.compile(r'\s*\{\s*"input"\s*:\s*"')
_PAIR = 12  # characters of a surrogate pair: two of `\u0000`


class InputText:
    """Reads the arguments `{"input": "..."}` of one call. Arguments of another form are the input as they are."""

    def __init__(self) -> None:
        self._held = ""  # of the object before the string, or of an escape in it
        self._begun = False
        self._ended = False
        self._other = False  # the arguments have another form

    def feed(self, arguments: str) -> str:
        """Returns what the next piece of the arguments adds to the input."""
        if self._ended:
            return ""
        text = self._held + arguments
        if not self._begun and not self._other:
            found = _OPENING.match(text, partial=True)
            if found is not None and found.partial:
                self._held = text
                return ""
            self._begun, self._other = found is not None, found is None
            text = text if found is None else text[found.end() :]
        self._held = ""
        return text if self._other else self._string(text)

    def _string(self, text: str) -> str:
        """Returns the text of a piece of the string. Keeps an escape that is not whole."""
        parts, begin = [], 0
        while True:
            position = min((at for char in '"\\' if (at := text.find(char, begin)) >= 0), default=len(text))
            parts.append(text[begin:position])
            if position == len(text):
                return "".join(parts)
            if text[position] == '"':
                self._ended = True
                return "".join(parts)
            end = _end_of_escape(text, position)
            if end is None:
                self._held = text[position:]
                return "".join(parts)
            parts.append(_unescaped(text[position:end]))
            begin = end


def _end_of_escape(text: str, begin: int) -> int | None:
    """Returns where the escape that begins there ends; None: its end may not have come yet."""
    left = len(text) - begin
    if left < 2:
        return None
    if text[begin + 1] != "u":
        return begin + 2
    if left < 6:
        return None
    is_high = text[begin + 2 : begin + 4].lower() in ("d8", "d9", "da", "db")
    if not is_high or not "\\u".startswith(text[begin + 6 : begin + 8]):
        return begin + 6
    return begin + _PAIR if left >= _PAIR else None


def _unescaped(escape: str) -> str:
    try:
        text = str(json.loads(f'"{escape}"'))
    except ValueError:
        return escape  # no escape of JSON
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
