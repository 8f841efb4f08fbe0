"""The reading of the answers to one chat: which marks count, and what becomes of the parts that they tell apart."""

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.text.model_output.channel_marks import are_spelled, mark_tokens
from services.gateway.text.model_output.forms import AnswerForms
from services.gateway.text.model_output.parser import ParserTables
from services.gateway.text.model_output.told import Answer
from services.gateway.text.tokenizer import Tokenizer

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The way in which the choices of one request are read.

    start: the answer after the part of the assistant's message that the prompt has. marks: special tokens whose text
    tells parts apart; written: what stands for some tokens in that text. call_ids: see ToolForm.
    single_call: the answer ends with its first call.
    shows_reasoning: else it is left out. inserted: a text about the tools was put into the prompt.
    reasons: the answer may have reasoning. custom: names of tools whose calls have an input in the place of arguments.
    """

    start: Answer
    marks: frozenset[int]
    written: Mapping[int, str] = field(default_factory=dict)
    call_ids: int = 0
    single_call: bool = False
    shows_reasoning: bool = True
    inserted: bool = False
    reasons: bool = False
    custom: frozenset[str] = frozenset()

    def begin(self) -> Answer:
        """Returns what tells the text of one choice apart."""
        return self.start.copied()

    def new_call_id(self) -> str:
        """Returns an id for a call of a tool."""
        if self.call_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(self.call_ids))
        return f"call_{secrets.token_hex(12)}"


class MarkTokens:
    """The special tokens that are marks in a model's answers.

    written: tokens that answers have as another text; empty: none. spelled: marks of channels are no tokens.
    """

    def __init__(self, forms: AnswerForms, tokenizer: Tokenizer) -> None:
        texts = {token: tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids}

        def marks(tables: ParserTables) -> frozenset[int]:
            return frozenset(token for token, text in texts.items() if text and tables.template.shows(text))

        in_channels = forms.channels is not None
        self.written: Mapping[int, str] = mark_tokens(tokenizer) if in_channels else {}
        self.spelled = in_channels and are_spelled(tokenizer)
        self._with_calls, self._without_calls = (
            marks(tables) | self.written.keys() for tables in (forms.with_calls, forms.without_calls)
        )

    def of(self, *, with_calls: bool) -> frozenset[int]:
        """Returns the tokens that answers need. with_calls: to requests with tools."""
        return self._with_calls if with_calls else self._without_calls
