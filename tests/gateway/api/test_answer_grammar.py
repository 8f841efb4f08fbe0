"""Grammars of chats' answers: which answers they accept, by the library that follows them."""

from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken

from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.answer_grammar import ReasoningFirst, WantedAnswer, answer_grammar
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.structured import StructuredOutputs
from services.gateway.api.requests.tools import FunctionTool, NamedChoice, Tool, ToolChoice
from services.gateway.text.model_output.formats import REASONING_FORMS, TOOL_FORMS
from services.gateway.text.model_output.template import Part, load_template
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizer_files import byte_level

NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any] | None = None, strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return FunctionTool.model_validate({"type": "function", "function": function})


def tokenizer(*added: str, special: bool = True) -> Tokenizer:
    """One whose `<think>` and `</think>` are tokens that are not special; `added` ones are, or not."""
    backend = byte_level()
    backend.add_tokens([AddedToken(text, special=special) for text in added])
    return Tokenizer(backend, {})


PLAIN = tokenizer()
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
SPECIAL = tokenizer(
    *("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "[THINK]", "[/THINK]"),
    *("<|tool_call|>", "<|/tool_call|>", *DEEPSEEK),
)
TWO = (tool("f"), tool("g", NUMBERS, strict=True))


def accepts(grammar: str, text: str, tokens: Tokenizer = PLAIN) -> bool:
    return accepts_tokens(grammar, tokens.backend.encode(text, add_special_tokens=False).ids, tokens)


def accepts_spelled(grammar: str, text: str, tokens: Tokenizer = PLAIN) -> bool:
    """True when a text is accepted that is spelled letter by letter, its marks too."""
    spelled = [token for letter in text for token in tokens.backend.encode(letter, add_special_tokens=False).ids]
    return accepts_tokens(grammar, spelled, tokens)


def accepts_tokens(grammar: str, ids: list[int], tokens: Tokenizer) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokens.backend.to_str()), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def wanted(
    calls: str, choice: ToolChoice | None = None, tools: tuple[Tool, ...] = TWO, one_call: bool = False, **more: Any
) -> WantedAnswer:
    call_form = TOOL_FORMS[calls].form
    return WantedAnswer(tools=tools, choice=choice, one_call=one_call, call_form=call_form, **more)


def thinking(*, begun: bool, budget: int | None = None, form: str = "think") -> ReasoningFirst:
    spec = {"start_anchor": "A:", "fields": {"reasoning": REASONING_FORMS[form].field}}
    field = load_template(spec).field_of(Part.REASONING)
    assert field is not None
    return ReasoningFirst(field=field, begun=begun, budget=budget)


def named(name: str) -> Any:
    return NamedChoice.model_validate({"type": "function", "function": {"name": name}})


F, G = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"n": 2}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def tagged(name: str, **arguments: str) -> str:
    """A call whose arguments are between tags."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "".join(calls) + "<｜tool▁calls▁end｜>"


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"

ONE_AND_TWO = {
    "granite": (f"<|tool_call|>[{G}]", f"<|tool_call|>[{F}, {G}]"),
    "phi4-mini": (f"<|tool_call|>[{G}]<|/tool_call|>", f"<|tool_call|>[{F}, {G}]<|/tool_call|>"),
    "functools": (f"functools[{G}]", f"functools[{F}, {G}]"),
    "deepseek-v3": (
        deepseek(V3.format("g", '{"n": 2}')),
        deepseek(V3.format("f", "{}"), "\n", V3.format("g", '{"n": 2}')),
    ),
    "deepseek-v31": (
        deepseek(V31.format("g", '{"n": 2}')),
        deepseek(V31.format("f", "{}"), V31.format("g", '{"n": 2}')),
    ),
    "hermes": (hermes(G), hermes(F, G)),
    "mistral": (f"[TOOL_CALLS] [{G}]", f"[TOOL_CALLS] [{F}, {G}]"),
    "mistral-args": ('[TOOL_CALLS]g[ARGS]{"n": 2}', '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"n": 2}'),
    "llama3-json": (G.replace("arguments", "parameters"), f"{F}; {G}".replace("arguments", "parameters")),
    "pythonic": ("[g(n=2)]", "[f(), g(n=2)]"),
    "qwen3-coder": (tagged("g", n="2"), tagged("f") + "\n" + tagged("g", n="2")),
}


def with_another_name(form: str, call: str) -> str:
    for before, after in (('"', '"'), ("=", ">"), ("｜>", "\n"), ("｜>", "<"), ("]", "["), ("[", "(")):
        if f"{before}g{after}" in call:
            return call.replace(f"{before}g{after}", f"{before}h{after}", 1)
    raise AssertionError(call)


@pytest.mark.parametrize("tokens", [PLAIN, SPECIAL], ids=["marks as text", "marks as tokens"])
@pytest.mark.parametrize("form", ONE_AND_TWO)
def test_a_call_that_is_required(form: str, tokens: Tokenizer) -> None:
    one, two = ONE_AND_TWO[form]
    grammar = answer_grammar(wanted(form, "required"), tokens)
    assert accepts(grammar, one, tokens)
    assert accepts(grammar, two, tokens)
    wrong = ["", "text", one[:-1], one.replace("2", '"2"'), with_another_name(form, one)]
    assert [text for text in wrong if accepts(grammar, text, tokens)] == []
    single = answer_grammar(wanted(form, "required", one_call=True), tokens)
    assert accepts(single, one, tokens)
    assert not accepts(single, two, tokens)


@pytest.mark.parametrize("form", ONE_AND_TWO)
def test_a_call_of_a_named_tool(form: str) -> None:
    one, two = ONE_AND_TWO[form]
    grammar = answer_grammar(wanted(form, named("g")), PLAIN)
    assert accepts(grammar, one)
    assert not accepts(grammar, two)
    assert not accepts(answer_grammar(wanted(form, named("f")), PLAIN), one)


@pytest.mark.parametrize("tokens", [PLAIN, SPECIAL], ids=["marks as text", "marks as tokens"])
@pytest.mark.parametrize("form", ONE_AND_TWO)
def test_calls_of_strict_tools_are_held_from_where_they_begin(form: str, tokens: Tokenizer) -> None:
    one, two = ONE_AND_TWO[form]
    grammar = answer_grammar(wanted(form), tokens)
    right = ["Some text, 1 < 2.", "", one, two]
    if form not in ("llama3-json", "pythonic"):
        right += [f"Wait.\n{one}", f"{one}\nDone.", f"A {two} b"]
    wrong = [one.replace("2", '"2"'), with_another_name(form, one)]
    assert [text for text in right if not accepts(grammar, text, tokens)] == []
    assert [text for text in wrong if accepts(grammar, text, tokens)] == []


@pytest.mark.parametrize("form", ["llama3-json", "pythonic"])
def test_white_space_does_not_free_a_call_of_a_strict_tool(form: str) -> None:
    one, _ = ONE_AND_TWO[form]
    grammar = answer_grammar(wanted(form), PLAIN)
    for space in (" ", "\n\n", "\t ", "\u2003"):
        assert accepts(grammar, space + one)
        assert accepts(grammar, space + "text")
        assert accepts(grammar, space)
        assert not accepts(grammar, space + one.replace("2", '"2"'))


def test_a_mark_that_is_a_token_is_not_spelled() -> None:
    grammar = answer_grammar(wanted("hermes"), SPECIAL)
    assert accepts_spelled(grammar, "if a <tool then <tool_cal", SPECIAL)
    assert not accepts_spelled(grammar, hermes(G), SPECIAL)


LEADS = tokenizer("<|python_tag|>", "<|python_start|>")


@pytest.mark.parametrize("tokens", [PLAIN, LEADS], ids=["mark as text", "mark as token"])
@pytest.mark.parametrize(("form", "lead"), [("llama3-json", "<|python_tag|>"), ("pythonic", "<|python_start|>")])
def test_a_mark_before_a_call_does_not_free_it(form: str, lead: str, tokens: Tokenizer) -> None:
    """Neither as a token nor in letters: the reader of calls takes both."""
    one, _ = ONE_AND_TWO[form]
    grammar = answer_grammar(wanted(form), tokens)
    for text in (lead + one, f" {lead}\n{one}"):
        assert accepts(grammar, text, tokens)
        assert not accepts(grammar, text.replace("2", '"2"'), tokens)
        assert not accepts_spelled(grammar, text.replace("2", '"2"'), tokens)
    assert accepts_spelled(grammar, f"{lead} is a mark", tokens)


@pytest.mark.parametrize("form", ONE_AND_TWO)
@pytest.mark.parametrize("tokens", [PLAIN, SPECIAL], ids=["marks as text", "marks as tokens"])
def test_a_budget_does_not_free_calls_of_strict_tools(form: str, tokens: Tokenizer) -> None:
    one, _ = ONE_AND_TWO[form]
    wrong = one.replace("2", '"2"')
    grammar = answer_grammar(wanted(form, reasoning=thinking(begun=False, budget=4)), tokens)
    right = ["Some text.", one, f"<think>ab</think>\n{one}", "<think>ab</think>Some text."]
    assert [text for text in right if not accepts(grammar, text, tokens)] == []
    freed = [wrong, f"<think>ab</think>\n{wrong}", "<think>far more than four tokens</think>yes"]
    assert [text for text in freed if accepts(grammar, text, tokens)] == []


PLAIN_MARKS = tokenizer("[THINK]", "[/THINK]", special=False)


@pytest.mark.parametrize("form", ONE_AND_TWO)
@pytest.mark.parametrize(
    ("tokens", "think"),
    [(PLAIN, "think"), (PLAIN_MARKS, "mistral-think"), (SPECIAL, "mistral-think")],
    ids=["tokens that are not special", "brackets that are not special", "special tokens"],
)
def test_no_spelling_of_the_mark_escapes_a_budget_beside_strict_tools(form: str, tokens: Tokenizer, think: str) -> None:
    opening, closing = REASONING_FORMS[think].field["open"], REASONING_FORMS[think].field["close"]
    reasoning = thinking(begun=False, budget=4, form=think)
    grammar = answer_grammar(wanted(form, reasoning=reasoning), tokens)
    assert accepts(grammar, f"{opening}ab{closing}Some text.", tokens)
    assert accepts_spelled(grammar, f"Some text with {opening} in it.", tokens)
    long = f"{opening}far more than four tokens{closing}yes"
    for text in (long, f" {long}", f"\n\x1c{long}", f"{opening}ab{closing}{long}", f"{opening}ab{closing}\n{long}"):
        assert not accepts(grammar, text, tokens)
        assert not accepts_spelled(grammar, text, tokens)


def test_a_call_does_not_end_a_budget() -> None:
    grammar = answer_grammar(wanted("hermes", reasoning=thinking(begun=False, budget=4)), PLAIN)
    assert accepts(grammar, hermes(G) + "\nyes")
    assert not accepts(grammar, hermes(G) + "\n<think>far more than four tokens</think>yes")


def test_tools_that_are_not_strict_take_any_arguments() -> None:
    grammar = answer_grammar(wanted("hermes"), PLAIN)
    assert accepts(grammar, hermes('{"name": "f", "arguments": {"x": [1]}}'))
    assert not accepts(
        answer_grammar(wanted("hermes", "required"), PLAIN), hermes('{"name": "f", "arguments": {"x": 1}}')
    )


def test_schemas_that_refer_to_themselves() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "kind": {"$ref": "#/$defs/k"}},
        "$defs": {"k": {"const": 1}},
    }
    grammar = answer_grammar(wanted("hermes", "required", tools=(tool("f", tree),)), PLAIN)
    assert accepts(grammar, hermes('{"name": "f", "arguments": {"next": {"next": {}, "kind": 1}}}'))
    assert not accepts(grammar, hermes('{"name": "f", "arguments": {"next": {"kind": 2}}}'))


def test_optional_arguments_in_python() -> None:
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in "abc"}, "required": ["b"]}
    grammar = answer_grammar(wanted("pythonic", "required", tools=(tool("f", schema),)), PLAIN)
    right = ["[f(b=true)]", "[f(a=true, b=false)]", "[f(b=true, c=true)]", "[f(a=true, b=true, c=true)]"]
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in ("[f()]", "[f(a=true)]", "[f(b=true, a=true)]") if accepts(grammar, text)] == []
    with pytest.raises(ApiError, match="as in Python"):
        answer_grammar(wanted("pythonic", "required", tools=(tool("f", {"properties": {"a": {"$ref": "#"}}}),)), PLAIN)


FORM, _ = grammar_of(None, StructuredOutputs.model_validate({"json": {"type": "array", "items": {"type": "integer"}}}))


def test_a_form_comes_after_the_reasoning() -> None:
    inside = answer_grammar(WantedAnswer(form=FORM, reasoning=thinking(begun=True)), PLAIN)
    assert accepts(inside, 'hm [x] {"\n</think>\n\n[1, 2]')
    assert [text for text in ("[1]", "hm</think>x", "hm") if accepts(inside, text)] == []
    before = answer_grammar(WantedAnswer(form=FORM, reasoning=thinking(begun=False)), PLAIN)
    assert accepts(before, "<think>hm</think>[1]")
    assert accepts(before, "[1]")
    assert not accepts(before, "hm</think>[1]")


def test_marks_that_are_not_tokens() -> None:
    bare = tokenizer()
    bare.added_tokens = {}
    reasoning = thinking(begun=True, form="mistral-think")
    grammar = answer_grammar(WantedAnswer(form=FORM, reasoning=reasoning), bare)
    assert accepts(grammar, "hm [x] [/THINK]\n[1]")
    assert not accepts(grammar, "hm [/THINK] x")
    with pytest.raises(ApiError, match="not one token"):
        answer_grammar(WantedAnswer(reasoning=thinking(begun=True, budget=5, form="mistral-think")), bare)


def test_a_budget_ends_the_reasoning() -> None:
    grammar = answer_grammar(WantedAnswer(reasoning=thinking(begun=True, budget=4)), PLAIN)
    ids = PLAIN.backend.encode("abcdefgh", add_special_tokens=False).ids
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(PLAIN.backend.to_str()), grammar, log_level=0)
    assert matcher.consume_tokens(ids[:4])
    assert not matcher.is_accepting()
    assert matcher.compute_ff_tokens() == [PLAIN.added_tokens["</think>"]]
    assert accepts(grammar, "ab</think>any text <think> at all")
    opened = answer_grammar(WantedAnswer(reasoning=thinking(begun=False, budget=4)), PLAIN)
    assert accepts(opened, "an answer without any reasoning")
    assert accepts(opened, "<think>ab</think>yes")
    assert not accepts(opened, "<think>far more than four tokens</think>yes")


@pytest.mark.parametrize("begun", [False, True])
def test_a_budget_of_none_ends_the_reasoning_at_once(begun: bool) -> None:
    opening = "" if begun else "<think>"
    grammar = answer_grammar(WantedAnswer(reasoning=thinking(begun=begun, budget=0)), PLAIN)
    assert accepts(grammar, f"{opening}</think>yes")
    assert not accepts(grammar, f"{opening}a</think>yes")


def test_a_form_beside_tools() -> None:
    grammar = answer_grammar(wanted("hermes", form=FORM), PLAIN)
    assert accepts(grammar, "[1, 2]")
    assert accepts(grammar, hermes(G))
    assert [text for text in ("text", hermes(G.replace("2", '"2"'))) if accepts(grammar, text)] == []


def test_a_model_without_a_grammar_of_its_calls() -> None:
    with pytest.raises(ApiError, match="not known"):
        answer_grammar(WantedAnswer(tools=TWO, choice="required"), PLAIN)


def test_too_many_schemas() -> None:
    large = {"type": "object", "properties": {f"property{number}": {"enum": ["x" * 400]} for number in range(100)}}
    with pytest.raises(ApiError, match="too large"):
        answer_grammar(wanted("hermes", "required", tools=tuple(tool(f"f{at}", large) for at in range(4))), PLAIN)
