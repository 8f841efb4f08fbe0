"""Marks: strings at which an answer goes over from any text to a form, as `</think>` or `<tool_call>`.

Many models have tokens for their marks. llguidance keeps such tokens apart from text: a text cannot contain one, and a
mark that is written with other tokens is text. So a mark that the tokenizer has tokens for is those tokens here.

Grammars are in llguidance's notation (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

import re
from collections.abc import Mapping
from itertools import count

import orjson

from services.gateway.api.grammars.forms import lark_string

# Any text, which ends where a mark begins; rules that use it are lazy, or end with a token.
ANY = "ANY_TEXT: /(?s:.*)/"


class Marks:
    """Writes marks, and texts up to marks, as parts of a grammar in Lark's notation.

    tokens: the tokens that are marks or have parts of marks, by their text (`Tokenizer.marks`).
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._tokens_in = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._numbers = count()

    def literal(self, text: str) -> str:
        """Returns an expression of exactly this text."""
        return " ".join(
            [lark_string(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in self._split(text)]
        )

    def whole(self, text: str, num_chars: int) -> str:
        """Returns the first `num_chars` characters of a text, and those of a token that they end in."""
        end = 0
        for piece in self._tokens_in.finditer(text) if self._tokens_in else ():
            if piece.start() < num_chars:
                end = piece.end()
        return text[: max(end, num_chars)]

    def text_until(self, marks: tuple[str, ...], text: str = "ANY_TEXT") -> tuple[str, list[str]]:
        """Returns an expression of a text up to the first of these marks, with the mark, and the rules that it needs.

        text: the terminal that texts are of.
        """
        plain = [mark for mark in marks if all(isinstance(piece, str) for piece in self._split(mark))]
        choices, rules = [], []
        if plain:
            name = f"until_{next(self._numbers)}"
            ending = " | ".join(map(lark_string, plain))
            rules += [f"{name.upper()}: {ending}", f"{name}[lazy]: {text} {name.upper()}"]
            choices.append(name)
        for mark in marks:
            if mark not in plain:
                expression, needed = self._until_token(mark, text)
                choices.append(expression)
                rules += needed
        return "(" + " | ".join(choices) + ")", rules

    def _until_token(self, mark: str, text: str) -> tuple[str, list[str]]:
        """A text cannot contain the token, so its end is plain. What stands before the token is the end of the text."""
        before = self._split(mark)[0]
        if not isinstance(before, str):
            return f"{text} {self.literal(mark)}", []
        name = f"UNTIL_{next(self._numbers)}"
        return f"{name} {self.literal(mark[len(before) :])}", [f"{name}: {text} {lark_string(before)}"]

    def _split(self, text: str) -> list[str | int]:
        """Returns texts and ids of tokens, in turn."""
        if self._tokens_in is None:
            return [text]
        pieces: list[str | int] = []
        end = 0
        for found in self._tokens_in.finditer(text):
            pieces += [*([text[end : found.start()]] if found.start() > end else []), self._tokens[found[0]]]
            end = found.end()
        return [*pieces, text[end:]] if end < len(text) or not pieces else pieces


def after(mark: str, grammar: str, tokens: Mapping[str, int]) -> str:
    """Returns the grammar of any text up to the first `mark`, the mark, and then what `grammar` describes.

    tokens: see `Marks`.
    """
    grammars = grammars_of(grammar)
    name = f"after_{len(grammars)}"
    until, rules = Marks(tokens).text_until((mark,))
    lark = "\n".join([f"start: {until} @{name}", *rules, ANY])
    return orjson.dumps({"grammars": [{"lark_grammar": lark}, {**grammars[0], "name": name}, *grammars[1:]]}).decode()


def grammars_of(grammar: str) -> list[dict[str, object]]:
    """Returns the grammars that a grammar's text has. The first one is where answers begin."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    found: list[dict[str, object]] = orjson.loads(grammar)["grammars"]
    return found
