"""The grammar of a chat's answers: reasoning first, then calls of tools, or a form, or any text."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.api.errors import invalid, unsupported
from services.gateway.api.grammars.call_grammar import ANY_ARGUMENTS, add_calls, add_text_with_calls
from services.gateway.api.grammars.grammar_rules import Rules, in_pattern
from services.gateway.api.requests.tools import CustomTool, NamedChoice, Tool, ToolChoice
from services.gateway.text.model_output.formats import CallForm
from services.gateway.text.model_output.template import Field
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.sampling import MAX_GRAMMAR

_SPACE = r"/[ \n]{0,4}/"  # between reasoning and answer
_BLANK = r"[\s\x1c-\x1f]*"  # before a mark that opens reasoning
_ANYTHING = "anything"  # the name of a rule: any tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFirst:
    """The reasoning before an answer.

    begun: the prompt opens it; else the model may open it. budget: in tokens; None: any number.
    """

    field: Field
    begun: bool
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedAnswer:
    """The answers that are allowed.

    tools: those that it may call; choice: None is auto. form: a grammar; empty: any text.
    """

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None
    one_call: bool = False
    call_form: CallForm | None = None
    form: str = ""
    reasoning: ReasoningFirst | None = None

    @property
    def must_call(self) -> bool:
        """True when the answer is a call."""
        return self.choice == "required" or isinstance(self.choice, NamedChoice)

    @property
    def strict(self) -> bool:
        """True when a call of some tool must match its schema, or its grammar."""
        return any(tool.is_held for tool in self.tools)

    @property
    def constrained(self) -> bool:
        """True when there are answers that are not allowed."""
        budget = self.reasoning is not None and self.reasoning.budget is not None
        return self.must_call or bool(self.form) or self.strict or budget


def answer_grammar(wanted: WantedAnswer, tokenizer: Tokenizer) -> str:
    """Returns the grammar, in llguidance's notation. Raises ApiError."""
    rules = Rules(tokenizer.added_tokens)
    rules.add("start", "")  # the first rule; its body follows
    if wanted.must_call or wanted.strict:
        answer = _add_calls(rules, wanted)
    elif wanted.form:
        answer = rules.grammar("form", wanted.form)
    else:
        answer = rules.add(_ANYTHING, "<[*]>*")
    any_text = not wanted.must_call and not wanted.form
    rules.add("start", _after_reasoning(rules, wanted.reasoning, answer, tokenizer, any_text=any_text))
    return checked_size(rules.written())


def checked_size(grammar: str) -> str:
    """Returns the grammar of an answer. Raises ApiError for one that is too large."""
    if len(grammar) > MAX_GRAMMAR // 2:
        raise invalid("Invalid 'tools': their schemas are too large to make a grammar of.", "tools")
    return grammar


def offered_tools(wanted: WantedAnswer) -> Sequence[Tool]:
    """Returns the tools that may be called; those that nothing holds, with any arguments."""
    if isinstance(wanted.choice, NamedChoice):
        return [tool for tool in wanted.tools if tool.function.name == wanted.choice.name]
    return wanted.tools if wanted.must_call else [_loosened(tool) for tool in wanted.tools]


def _add_calls(rules: Rules, wanted: WantedAnswer) -> str:
    form = wanted.call_form
    if form is None:
        words = (
            "a grammar of this model's calls is not known: 'tool_choice' must be auto or none, and no tool 'strict'."
        )
        raise unsupported("tool_choice", f"Invalid 'tool_choice': {words}")
    tools = offered_tools(wanted)
    if wanted.must_call:
        return add_calls(rules, form, tools, one=wanted.one_call or isinstance(wanted.choice, NamedChoice))
    if wanted.form:
        calls = add_calls(rules, form, tools, one=wanted.one_call)
        return rules.add("answer", f"{calls} | {rules.grammar('form', wanted.form)}")
    return add_text_with_calls(rules, form, tools, one=wanted.one_call, excluded=_openings(wanted.reasoning))


def _openings(reasoning: ReasoningFirst | None) -> Sequence[str]:
    """Patterns of texts that open reasoning without a bound, where there is one: spelled in letters, or once more."""
    if reasoning is None or reasoning.budget is None:
        return ()
    assert reasoning.field.open is not None
    marks = "|".join(map(in_pattern, reasoning.field.open.literals))
    before = _BLANK if reasoning.field.leads else r"(.|\n)*"
    return (f"{before}({marks})",)


def _loosened(tool: Tool) -> Tool:
    """The tool as it is where its calls are held, and a custom tool; else with any arguments."""
    if tool.is_held or isinstance(tool, CustomTool):
        return tool
    return tool.model_copy(update={"function": tool.function.model_copy(update={"parameters": dict(ANY_ARGUMENTS)})})


def _after_reasoning(
    rules: Rules, reasoning: ReasoningFirst | None, answer: str, tokenizer: Tokenizer, *, any_text: bool
) -> str:
    if reasoning is None:
        return answer
    assert reasoning.field.open is not None
    opening = rules.text(reasoning.field.open.literals[0])
    thought = _add_reasoning(rules, reasoning, tokenizer)
    if not any_text:
        thought = f"{thought} {rules.add('SPACE', _SPACE)}"
    if reasoning.begun:
        return f"{thought} {answer}"
    token = rules.token(reasoning.field.open.literals[0])
    if reasoning.budget is not None and answer == _ANYTHING and token is not None:
        # Any tokens would be reasoning without a bound, too. Other answers never begin with this token.
        return f"{opening} {thought} {answer} | (<[^{token}]> {answer})?"
    return f"({opening} {thought})? {answer}"


def _add_reasoning(rules: Rules, reasoning: ReasoningFirst, tokenizer: Tokenizer) -> str:
    """Adds the rule of reasoning and the mark after it; returns its name."""
    assert reasoning.field.close is not None
    closing = reasoning.field.close.literals[0]
    token = rules.token(closing)
    if token is not None:
        inside = ",".join(map(str, sorted({*tokenizer.special_ids, token})))
        times = "*" if reasoning.budget is None else f"{{0,{reasoning.budget}}}"
        thought = "" if reasoning.budget == 0 else f"<[^{inside}]>{times} "  # {0,0} is none of the grammar's
        return rules.add("reasoning", f"{thought}<[{token}]>")
    if reasoning.budget is not None:
        words = "the end of this model's reasoning is not one token, so that it cannot be forced."
        raise unsupported("thinking_token_budget", f"Invalid 'thinking_token_budget': {words}")
    return rules.add("reasoning[lazy]", rf"/(.|\n)*{in_pattern(closing)}/")
