"""Rules of a grammar, while it is made: those that others name, and the grammars beside them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson


class Rules:
    """Rules in llguidance's notation of Lark, and the grammars that they name.

    added: the tokens that the tokenizer adds to its vocabulary, by their text. Where a rule has such a text, it asks
    for the token, and not for the letters.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        longest_first = sorted((text for text in added if text), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: dict[str, str] = {}
        self._grammars: dict[str, dict[str, Any]] = {}

    def add(self, name: str, rule: str) -> str:
        """Adds a rule; returns its name. `name` may have attributes: `head[lazy]`."""
        self._rules[name] = rule
        return name.partition("[")[0]

    def token(self, text: str) -> int | None:
        """The added token with this text."""
        return self._added.get(text)

    def text(self, text: str) -> str:
        """A text as an expression."""
        parts, end = [], 0
        for found in self._split.finditer(text):
            parts += [text[end : found.start()], self._added[found.group()]]
            end = found.end()
        parts.append(text[end:])
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part != ""
        )

    def grammar(self, name: str, grammar: str) -> str:
        """Adds a grammar of its own; returns the expression that names it."""
        if grammar.lstrip().startswith("{"):
            first, *others = orjson.loads(grammar)["grammars"]
            self._grammars[name] = {**first, "name": name}
            self._grammars.update({each["name"]: each for each in others})
        else:
            self._grammars[name] = {"name": name, "lark_grammar": grammar}
        return f"@{name}"

    def written(self) -> str:
        """The whole, in llguidance's notation."""
        lark = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return orjson.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars.values()]}).decode()


def in_pattern(text: str) -> str:
    """A text inside a regular expression of a rule."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
