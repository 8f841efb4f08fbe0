"""The grammar of answers in channels, the format `harmony`: analysis first, then a call or the final message."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.api.errors import unsupported
from services.gateway.api.grammars.answer_grammar import WantedAnswer, checked_size, offered_tools
from services.gateway.api.grammars.call_grammar import json_arguments
from services.gateway.api.grammars.grammar_rules import Rules
from services.gateway.api.requests.tools import Tool
from services.gateway.text.model_output.channel_marks import CHANNEL_TEXTS
from services.gateway.text.model_output.channels import ChannelAnswer, Place
from services.gateway.text.tokenizer import Tokenizer

_NEXT = "<|end|><|start|>assistant"
_ANALYSIS = "<|channel|>analysis<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_FINAL = "<|channel|>final<|message|>"
_CONSTRAIN = "<|constrain|>"


def channel_grammar(
    wanted: WantedAnswer, answer: ChannelAnswer, budget: int | None, tokenizer: Tokenizer, param: str
) -> str:
    """Returns the grammar, in llguidance's notation. Raises ApiError.

    answer: after the part of the assistant's message that the prompt has. budget: of the analysis, in tokens; None: any
    number. param: the request's field that asks for it. The mark after a call, or after the final message, is an EOS
    token, and no part of the grammar.
    """
    rules = Rules(tokenizer.added_tokens)
    missing = next((text for text in CHANNEL_TEXTS if rules.token(text) is None), None)
    if missing is not None or answer.in_header:
        reason = "the prompt has begun a header" if missing is None else f"its tokenizer has no token '{missing}'"
        words = f"{reason}, so that no grammar of its channels is made."
        raise unsupported(param, f"'{param}' is not supported with this model: {words}")
    rules.add("start", "")  # the first rule; its body follows
    marks = {*tokenizer.special_ids, *(tokenizer.added_tokens[text] for text in CHANNEL_TEXTS)}
    letters = f"<[^{','.join(map(str, sorted(marks)))}]>"
    text = rules.add("text", f"{letters}*")
    thought = text if budget is None else rules.add("thought", f"{letters}{{0,{budget}}}" if budget else '""')
    rules.add("start", _start(rules, _add_messages(rules, wanted, text), answer, thought, budget))
    return checked_size(rules.written())


@dataclass(frozen=True, slots=True)
class _Messages:
    """Expressions of the messages after the analysis.

    end: the last one. shown: the text of a final message; empty: there is none. preamble: a message of content before
    the last one, and the header after it; empty: there is none.
    """

    end: str
    shown: str
    preamble: str


def _add_messages(rules: Rules, wanted: WantedAnswer, text: str) -> _Messages:
    shown = "" if wanted.must_call else text
    if wanted.form:
        shown = rules.grammar("form", wanted.form)
    ends = [f"{rules.text(_FINAL)} {shown}"] if shown else []
    if wanted.tools:
        ends.append(_add_calls(rules, offered_tools(wanted)))
    preamble = "" if wanted.form else f"{rules.text(_PREAMBLE)} {text} {rules.text(_NEXT)}"
    return _Messages(rules.add("end", " | ".join(ends)), shown, preamble)


def _add_calls(rules: Rules, tools: Sequence[Tool]) -> str:
    """Adds the rule of a call, whose function is before the channel or after it, as models write both."""
    constrain = "" if rules.token(_CONSTRAIN) is None else f' | " "? {rules.text(f"{_CONSTRAIN}json")}'
    rules.add("kind", f'(" json"{constrain})?')
    message, choices = rules.text("<|message|>"), []
    for number, tool in enumerate(tools):
        to = f" to=functions.{tool.function.name}"
        headers = (rules.text(f"{to}<|channel|>commentary"), rules.text(f"<|channel|>commentary{to}"))
        arguments = json_arguments(rules, tool, number)
        choices.append(rules.add(f"call_{number}", f"({' | '.join(headers)}) kind {message} {arguments}"))
    return rules.add("call", " | ".join(choices))


def _start(rules: Rules, messages: _Messages, answer: ChannelAnswer, thought: str, budget: int | None) -> str:
    """Returns the expression of the answer's rest. Where tokens of the analysis are counted, it is one message."""
    following = rules.text(_NEXT)
    analysis = "" if budget == 0 else f"{rules.text(_ANALYSIS)} {thought} {following}"
    after = rules.add("after", f"({messages.preamble})? end" if messages.preamble else "end")
    if budget is None:
        before = rules.add("before", " | ".join(filter(None, [analysis, messages.preamble])))
        whole = rules.add("whole", f"{before}* end")
    else:
        whole = rules.add("whole", f"({analysis})? {after}" if analysis else after)
    if answer.place is Place.HEADER:
        return whole
    if answer.reasons:
        return f"{thought} {following} {whole if budget is None else after}"
    if answer.shows and messages.shown:
        return messages.shown
    return f"{rules.text(_NEXT if answer.place is Place.MESSAGE else '<|start|>assistant')} {whole}"
