"""Grammars of answers in channels: which answers they accept, by the library that follows them."""

from typing import Any

import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.answer_grammar import WantedAnswer
from services.gateway.api.grammars.channel_grammar import channel_grammar
from services.gateway.api.requests.tools import CustomTool, Tool, ToolChoice
from services.gateway.text.model_output.channel_marks import MARKS
from services.gateway.text.model_output.channels import ChannelAnswer, Channels
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_answer_grammar import FORM, NUMBERS, PLAIN, TWO, accepts, named, tokenizer, tool

TOKENS = tokenizer(*MARKS)
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>{}<|end|><|start|>assistant"
THOUGHT = ANALYSIS.format("hm")
FINAL = "<|channel|>final<|message|>{}"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
G, WRONG = CALL.format("g", '{"n": 2}'), CALL.format("g", '{"n": "2"}')


def grammar(
    choice: ToolChoice | None = None,
    tools: tuple[Tool, ...] = TWO,
    *,
    begun: str = "",
    budget: int | None = None,
    tokens: Tokenizer = TOKENS,
    **more: Any,
) -> str:
    wanted = WantedAnswer(tools=tools, choice=choice, **more)
    return channel_grammar(wanted, ChannelAnswer(Channels(), begun, {}), budget, tokens, "tools")


def accepted(grammar: str, *texts: str) -> list[str]:
    return [text for text in texts if accepts(grammar, text, TOKENS)]


def test_a_call_that_is_required() -> None:
    held = grammar("required")
    right = [
        G,
        THOUGHT + G,
        THOUGHT + ANALYSIS.format("so <b") + PREAMBLE.format("I look.") + G,
        ' to=functions.g<|channel|>commentary json<|message|>{"n": 2}',
        '<|channel|>commentary to=functions.g<|constrain|>json<|message|>{"n": 2}',
        '<|channel|>commentary to=functions.g<|message|>{"n": 2}',
        CALL.format("f", "{}"),
    ]
    wrong = ["", "text", THOUGHT, WRONG, FINAL.format("x"), CALL.format("h", "{}"), G[:-1], G + "<|end|>", G + " x"]
    assert accepted(held, *right) == right
    assert accepted(held, *wrong) == []


def test_a_call_of_a_named_tool() -> None:
    held = grammar(named("g"))
    assert accepted(held, G, CALL.format("f", "{}")) == [G]


def test_calls_of_strict_tools_are_held_and_other_text_is_not() -> None:
    held = grammar()
    right = [FINAL.format("1 < 2"), THOUGHT + FINAL.format(""), G, THOUGHT + G, PREAMBLE.format("I look.") + G]
    right += [CALL.format("f", '{"x": [1]}'), FINAL.format("to=functions.g is how one calls it")]
    assert accepted(held, *right) == right
    wrong = [WRONG, THOUGHT + WRONG, CALL.format("h", "{}"), CALL.format("f", "[1]"), "text", FINAL.format("a") + WRONG]
    assert accepted(held, *wrong) == []


def test_a_form_is_that_of_the_final_message() -> None:
    held = grammar(tools=(), form=FORM)
    right = [FINAL.format("[1, 2]"), THOUGHT + ANALYSIS.format("[x") + FINAL.format("[]")]
    assert accepted(held, *right) == right
    assert accepted(held, "[1]", FINAL.format("x"), PREAMBLE.format("x") + FINAL.format("[1]"), THOUGHT) == []
    beside = grammar(form=FORM)
    assert accepted(beside, FINAL.format("[1]"), G, FINAL.format("x"), WRONG) == [FINAL.format("[1]"), G]


def test_a_budget_ends_the_analysis() -> None:
    held = grammar(tools=(), budget=4)
    right = [ANALYSIS.format("abcd") + FINAL.format("far more than four tokens"), FINAL.format("yes")]
    assert accepted(held, *right, PREAMBLE.format("I look") + FINAL.format("x")) == [
        *right,
        PREAMBLE.format("I look") + FINAL.format("x"),
    ]
    wrong = [ANALYSIS.format("12345") + FINAL.format("x"), ANALYSIS.format("12") * 2 + FINAL.format("x")]
    assert accepted(held, *wrong) == []
    none = grammar(tools=(), budget=0)
    assert accepted(none, FINAL.format("x"), ANALYSIS.format("") + FINAL.format("x")) == [FINAL.format("x")]
    call = grammar("required", budget=4)
    assert accepted(call, ANALYSIS.format("abcd") + G, ANALYSIS.format("12345") + G) == [ANALYSIS.format("abcd") + G]


@pytest.mark.parametrize(
    ("begun", "right", "wrong"),
    [
        ("<|channel|>analysis<|message|>So", " on<|end|><|start|>assistant" + G, G),
        ("<|channel|>final<|message|>So", "<|end|><|start|>assistant" + G, G),
        ("<|channel|>analysis<|message|>So<|end|>", "<|start|>assistant" + G, G),
    ],
)
def test_the_prompt_may_have_begun_the_answer(begun: str, right: str, wrong: str) -> None:
    assert accepted(grammar("required", begun=begun), right, wrong) == [right]


def test_a_form_goes_on_in_a_final_message_that_has_begun() -> None:
    held = grammar(tools=(), form=FORM, begun="<|channel|>final<|message|>")
    assert accepted(held, "[1]", "x", FINAL.format("[1]")) == ["[1]"]
    inside = grammar(tools=(), budget=2, begun="<|channel|>analysis<|message|>")
    right = "ab<|end|><|start|>assistant" + FINAL.format("x")
    assert accepted(inside, right, "abc<|end|><|start|>assistant" + FINAL.format("x")) == [right]


def test_the_input_of_a_custom_tool_is_held_in_its_string() -> None:
    spec = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    custom = CustomTool.model_validate({"type": "custom", "custom": {"name": "c", "format": spec}})
    held = grammar("required", (custom, tool("g", NUMBERS)))
    assert accepted(held, CALL.format("c", '{"input": "12"}'), CALL.format("c", '{"input": "x"}'), G) == [
        CALL.format("c", '{"input": "12"}'),
        G,
    ]


def test_what_no_grammar_is_made_of_is_refused_in_words() -> None:
    with pytest.raises(ApiError, match="has no token"):
        grammar("required", tokens=PLAIN)
    with pytest.raises(ApiError, match="the prompt has begun a header"):
        grammar("required", begun="<|channel|>final")
