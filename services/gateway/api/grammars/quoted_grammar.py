"""Grammars of texts that stand in JSON strings: every terminal as it is written between quotes.

JSON writes a text character by character, so the terminals of a grammar can be rewritten one by one: what the rewritten
grammar matches is what the grammar matches, quoted. A rule that does not lead back to itself becomes a terminal. The
lexer of the grammar engine looks one byte ahead, and an escape has more: it would take the backslash of `\\n` for the
terminal before it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter

import orjson
import regex

from services.gateway.api.grammars.forms import too_large, wrong

_MAX_CHARS = 1 << 20  # of a quoted grammar: one character of a pattern may become several hundred

# In Lark's notation: what is not copied as it is.
_TOKEN = re.compile(
    r"(?P<comment>(?://|#)[^\n]*)"
    r'|(?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)"
    r"|(?P<imported>%import[^\n]*)"
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<alias>->\s*\w+)"
    r"|(?P<rule>[?!]?\b_?[a-z][a-z0-9_]*\b(?P<defined>(?:\.[0-9]+)?\s*:)?)"
    r"|(?P<terminal>\b_?[A-Z][A-Z0-9_]*\b)"
    r"|(?P<other>%\w+|<[^<>\s]+>|[\"/&@\[{]|~(?!\s*\d))"  # a lone quote or slash: a text that does not end
)
# The terminals of Lark's library that grammars of texts import.
_LIBRARY: Mapping[str, str] = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"[0-9]+(\.[0-9]+)?",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*")
_RANGE = re.compile(r'("(?:\\.|[^"\\])*")\s*\.\.\s*("(?:\\.|[^"\\])*")')

# In a regular expression: what matches one character, and what is copied as it is.
_ATOM = re.compile(
    r"(?P<kept>\(\?(?:[a-zA-Z-]*[:)]|P?<\w+>)|[()|*+?^$]|\{[0-9]*,?[0-9]*\})"
    r"|(?P<one>\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\\(?:[xu]\{[0-9a-fA-F]+\}|x..|u....|U.{8}|[pP](?:\{[^}]*\}|.)|.)|.)",
    re.DOTALL,
)
_BRACED = re.compile(r"\\[xu]\{([0-9a-fA-F]{1,8})\}")
_SPECIAL = ['"', "\\", *map(chr, range(0x20))]  # characters that JSON escapes
_SPECIAL_CLASS = r'["\\\x00-\x1f]'


def quoted_lark(grammar: str, param: str) -> str:
    """Returns a grammar in Lark's notation of the quoted texts, without the quotes. Raises ApiError."""
    tokens = list(_tokens(grammar, param))
    terminals = {} if any(token["ignore"] for token in tokens) else _terminals(tokens)

    def written(token: re.Match[str]) -> str:
        if token["rule"] is None:
            return _WRITERS[str(token.lastgroup)](token.group(), param)
        name = _name(token["rule"])
        if (terminal := terminals.get(name)) is None:
            return token.group()
        if token["defined"] is None:
            return terminal
        return f"start: {terminal}\n{terminal}:" if name == "start" else f"{terminal}:"

    return _checked(_TOKEN.sub(written, grammar), param)


def _tokens(grammar: str, param: str) -> Iterator[re.Match[str]]:
    """Yields the tokens of a grammar. Raises ApiError at the first that cannot be quoted: no text is read twice."""
    for token in _TOKEN.finditer(grammar):
        if token["other"] is not None:
            raise wrong(param, f"'{token['other'][:40]}' is not supported in the grammar of a custom tool.")
        yield token


def _terminals(tokens: Iterable[re.Match[str]]) -> dict[str, str]:
    """Returns new names for the rules that become terminals: those that lead to no rule that leads back to itself."""
    named: dict[str, set[str]] = {}
    inside: set[str] = set()
    for token in tokens:
        if token["rule"] is not None and token["defined"] is not None:
            inside = named.setdefault(_name(token["rule"]), set())
        elif token["rule"] is not None:
            inside.add(_name(token["rule"]))
    sorter = TopologicalSorter({name: rules & named.keys() for name, rules in named.items()})
    with suppress(CycleError):  # it then yields the rules that lead to no cycle
        sorter.prepare()
    found = list[str]()
    while ready := sorter.get_ready():
        found += ready
        sorter.done(*ready)
    return {name: f"QUOTED_{number}" for number, name in enumerate(found)}


def _name(text: str) -> str:
    return re.split(r"[\s.:]", text.lstrip("?!"), maxsplit=1)[0]


def quoted_regex(pattern: str, param: str) -> str:
    """Returns a grammar, in Lark's notation, of the texts that match a regular expression, quoted. Raises ApiError."""
    return _checked(f"start: {_terminal(pattern, '', param)}", param)


def _checked(quoted: str, param: str) -> str:
    if len(quoted) > _MAX_CHARS:
        raise too_large(param, f"it has more than {_MAX_CHARS} characters as it is written in JSON.")
    return quoted


def _terminal(pattern: str, flags: str, param: str) -> str:
    """Returns a regular expression of quoted texts as a terminal."""
    if set(flags) - {"i", "s"}:
        raise wrong(param, f"regular expressions with the flags {flags!r} are not supported in a custom tool.")
    folded = "i" in flags
    character = cache(partial(_character, every="s" in flags, param=param))  # patterns repeat theirs

    def quoted(found: re.Match[str]) -> str:
        return found.group() if found["kept"] else character(found["one"])

    inner = _ATOM.sub(quoted, pattern).replace("/", r"\/")
    return f"/(?i:{inner})/" if folded else f"/{inner}/"


def _character(atom: str, every: bool, param: str) -> str:
    """Returns what matches one character, quoted."""
    if len(atom) == 1 and atom not in _SPECIAL and atom != ".":
        return atom
    if atom == r"\/":
        return "/"
    if atom in (r"\b", r"\B"):
        raise wrong(param, "borders of words are not supported in a custom tool.")
    atom = _BRACED.sub(lambda found: rf"\U{int(found[1], 16):08x}", atom)
    try:
        one = regex.compile(atom, regex.VERSION1 | (regex.DOTALL if every else 0))
    except regex.error as error:
        raise wrong(param, f"the regular expression is not understood at {atom[:20]!r}.") from error
    escaped = [_in_json(special) for special in _SPECIAL if one.fullmatch(special)]
    if not escaped:
        return atom
    if any(one.fullmatch(char) is not None for char in _PLAIN) or atom.startswith("["):
        of_class = ("[\\x00-\\x{10ffff}]" if every else r"[^\n]") if atom == "." else atom
        escaped.append(f"[{of_class}--{_SPECIAL_CLASS}]")
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


_PLAIN = "a0 .é日"  # one of which every escape that stands for several characters matches, or they are all special


def _in_json(special: str) -> str:
    """Returns a pattern of a character as JSON writes it."""
    return f"(?-i:{re.escape(_inside(special))})" if special < " " else re.escape(_inside(special))


def _string(token: str, param: str) -> str:
    text, folded = token.removesuffix("i"), token.endswith("i")
    inside = _inside(_decoded(text, param))
    if folded and "\\" in inside:
        raise wrong(param, "texts in either case must not have control characters in a custom tool.")
    return orjson.dumps(inside).decode() + ("i" if folded else "")


def _range(token: str, param: str) -> str:
    found = _RANGE.fullmatch(token)
    assert found is not None
    first, last = (_decoded(text, param) for text in found.groups())
    if len(first) != 1 or len(last) != 1:
        raise wrong(param, "a range must be of single characters.")
    return _terminal(rf"[\U{ord(first):08x}-\U{ord(last):08x}]", "", param)


def _decoded(token: str, param: str) -> str:
    try:
        return str(orjson.loads(token))
    except orjson.JSONDecodeError as error:
        raise wrong(param, f"the text {token[:40]} is not understood.") from error


def _inside(text: str) -> str:
    return orjson.dumps(text).decode()[1:-1]


def _regex(token: str, param: str) -> str:
    end = token.rindex("/")
    return _terminal(token[1:end].replace(r"\/", "/"), token[end + 1 :], param)


def _imported(token: str, param: str) -> str:
    found = _IMPORT.fullmatch(token)
    if found is None or found[1] not in _LIBRARY:
        raise wrong(param, f"'{token[:60]}' is not supported: of 'common', {', '.join(_LIBRARY)} are.")
    return f"{found[2] or found[1]}: {_terminal(_LIBRARY[found[1]], '', param)}"


_WRITERS: Mapping[str, Callable[[str, str], str]] = {
    "comment": lambda token, param: "",
    "range": _range,
    "string": _string,
    "regex": _regex,
    "imported": _imported,
    "ignore": lambda token, param: token,
    "alias": lambda token, param: "",
    "terminal": lambda token, param: token,
}
