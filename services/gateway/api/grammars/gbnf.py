"""Grammars in GBNF, llama.cpp's notation, as llguidance's Lark: the same texts, whatever is nested in what.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md has the notation. A rule that does not lead back to
itself becomes a terminal, which the lexer of the grammar engine follows as one regular expression; names are new ones,
since those of GBNF are not all names in Lark.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import orjson

# The beginning of a rule, or of one that lacks a name: Lark has no such line, though it may have the sign elsewhere.
RULE_OF_GBNF = re.compile(r"(?:\A|[\r\n])[ \t]*[\w-]*[ \t]*::=")
_NAME = re.compile(r"[\w-]+")
_RULE = re.compile(r"(?<=[\r\n])[\w-]+[ \t]*::=")  # begins after an empty alternative, too
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TIMES = re.compile(r"\{[ \t\r\n]*([0-9]{1,9})[ \t\r\n]*(?:(,)[ \t\r\n]*([0-9]{1,9})?[ \t\r\n]*)?\}")
_ESCAPED = re.compile(r'\\(?:([nrt"\\\[\]])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))')
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = r"/[\x{0}-\x{10ffff}]/"
_MAX_TIMES = 10_000

Names = Callable[[str], str]  # the name in Lark of a rule


class GbnfError(ValueError):
    """Text that is no GBNF. The message is for a person, and names the line."""


@dataclass(frozen=True, slots=True)
class _Expression:
    """Part of a rule. write: returns it in Lark as one operand, of a terminal or not; uses: the rules that it names."""

    write: Callable[[Names, bool], str]
    uses: frozenset[str] = frozenset()


def gbnf_to_lark(text: str) -> str:
    """Returns a grammar in Lark. Raises GbnfError."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule 'root'")
    for name, rule in rules.items():
        if missing := rule.uses - rules.keys():
            raise GbnfError(f"rule '{name[:100]}' uses '{min(missing)[:100]}', which is none")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {rule.write(names.__getitem__, name in terminals)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _terminals(rules: dict[str, _Expression]) -> set[str]:
    """Finds the rules that do not lead back to themselves, nor to one that does."""
    found: set[str] = set()
    waiting = {name: set(rule.uses) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for used in rule.uses:
            users[used].append(name)
    ready = [name for name, uses in waiting.items() if not uses]
    while ready:
        found.add(name := ready.pop())
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Expression]:
        rules = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name()
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._alternatives(_SPACE)
            if self._peek() not in ("", "\r", "\n") and not _RULE.match(self._text, self._at):
                raise self._error("the end of the rule is expected")
            self._skip(_SPACE_AND_LINES)
        return rules

    def _alternatives(self, space: re.Pattern[str]) -> _Expression:
        found = [self._sequence(space)]
        while self._take("|"):
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(space))
        return _joined(found, " | ")

    def _sequence(self, space: re.Pattern[str]) -> _Expression:
        found: list[_Expression] = []
        while True:
            if self._peek() in ("*", "+", "?", "{"):
                if not found:
                    raise self._error("there is nothing to repeat")
                found[-1] = _repeated(found[-1], self._times())
            elif (element := self._element()) is not None:
                found.append(element)
            else:
                break
            self._skip(space)
        return _joined(found, " ") if found else _Expression(lambda *_: '""')

    def _element(self) -> _Expression | None:
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("("):
            self._skip(_SPACE_AND_LINES)
            inner = self._alternatives(_SPACE_AND_LINES)
            self._expect(")")
            return inner
        if self._take("."):
            return _Expression(lambda *_: _ANY)
        if _NAME.match(self._text, self._at) and not _RULE.match(self._text, self._at):
            name = self._name()
            return _Expression(lambda names, _: names(name), frozenset({name}))
        return None

    def _literal(self) -> _Expression:
        letters = []
        while not self._take('"'):
            letters.append(self._letter())
        whole = orjson.dumps("".join(letters)).decode()
        # Outside of terminals the lexer would take the longest of several texts that begin alike.
        apart = f"({' '.join(orjson.dumps(letter).decode() for letter in letters)})" if letters else whole
        return _Expression(lambda _, in_terminal: whole if in_terminal else apart)

    def _class(self) -> _Expression:
        negated, ranges = self._take("^"), []
        while not self._take("]"):
            low = high = self._letter()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._letter()
            if low > high:
                raise self._error("a range ends before it begins")
            ranges.append(rf"\x{{{ord(low):x}}}-\x{{{ord(high):x}}}")
        if not ranges and not negated:
            raise self._error("a class has no character")
        written = f"/[{'^' if negated else ''}{''.join(ranges)}]/" if ranges else _ANY
        return _Expression(lambda *_: written)

    def _letter(self) -> str:
        if self._peek() != "\\":
            if self._at >= len(self._text):
                raise self._error("the text ends within quotes or brackets")
            self._at += 1
            return self._text[self._at - 1]
        if (found := _ESCAPED.match(self._text, self._at)) is None:
            raise self._error("there is no such escape")
        self._at = found.end()
        if letter := found[1]:
            return _LETTERS.get(letter, letter)
        number = int(found[2] or found[3] or found[4], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise self._error("there is no such character")
        return chr(number)

    def _times(self) -> tuple[int, int | None]:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if (found := _TIMES.match(self._text, self._at)) is None:
            raise self._error("{m}, {m,} or {m,n} is expected")
        least = int(found[1])
        most = least if found[2] is None else None if found[3] is None else int(found[3])
        if max(least, most or 0) > _MAX_TIMES or (most is not None and most < least):
            raise self._error(f"a number of times is above {_MAX_TIMES}, or above the greatest one")
        self._at = found.end()
        return least, most

    def _name(self) -> str:
        if (found := _NAME.match(self._text, self._at)) is None:
            raise self._error("a name is expected")
        self._at = found.end()
        return found.group()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, sign: str) -> bool:
        if taken := self._text.startswith(sign, self._at):
            self._at += len(sign)
        return taken

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self._error(f"'{sign}' is expected")

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _error(self, words: str) -> GbnfError:
        return GbnfError(f"line {1 + self._text.count(chr(10), 0, self._at)}: {words}")


def _joined(parts: list[_Expression], sign: str) -> _Expression:
    if len(parts) == 1:
        return parts[0]
    uses = frozenset().union(*(part.uses for part in parts))
    return _Expression(lambda *how: f"({sign.join(part.write(*how) for part in parts)})", uses)


def _repeated(part: _Expression, times: tuple[int, int | None]) -> _Expression:
    least, most = times
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(times, f"{{{least},{'' if most is None else most}}}")
    if most == 0:
        return _Expression(lambda *_: '""', part.uses)
    return _Expression(lambda *how: f"({part.write(*how)}){sign}", part.uses)
