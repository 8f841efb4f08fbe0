"""The habits of a chat template with tools and calls: what it takes, and what it drops in silence. By probes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]]
_NOTHING: Mapping[str, Any] = {}

_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_KEY, _WORD = "kelvin", "cutoff"  # that no template has
XML_TOOLS = "xml_tools"  # the variable that SmolLM3's first templates read

USER: Mapping[str, Any] = {"role": "user", "content": "utterance"}


class Render(Protocol):
    """Renders messages with tools; None: the template refuses them."""

    def __call__(self, messages: _Messages, tools: _Tools, variables: Mapping[str, Any] = _NOTHING) -> str | None: ...


class ShownCalls(Enum):
    """The calls of one message that a template shows."""

    ALL = auto()
    FIRST = auto()
    NONE = auto()


class ToolsAre(Enum):
    """The place in which a template finds the tools."""

    TOOLS = auto()  # the variable `tools`
    XML_TOOLS = auto()  # the variable of that name
    IN_SYSTEM = auto()  # the key `tools` of the system's message, as JSON


@dataclass(frozen=True, slots=True)
class CallHabits:
    """The tools, calls and results that a template takes.

    apart: of a message with a text and calls, only one is shown. one_text: a message with calls has a text or
    reasoning, and is refused with both. no_results: results of calls are refused, or not shown. no_lone_results: those
    without a call before them are.
    """

    calls: ShownCalls = ShownCalls.ALL
    tools: ToolsAre = ToolsAre.TOOLS
    apart: bool = False
    one_text: bool = False
    no_results: bool = False
    no_lone_results: bool = False


PLAIN_CALLS = CallHabits()  # of a template that shows all of a history


def find_call_habits(render: Render, *, texts: bool, alternates: bool) -> CallHabits:
    """Returns the habits of a template. texts: arguments are texts. alternates: see Habits."""
    return _Probes(render, texts, alternates).found()


class _Probes:
    def __init__(self, render: Render, texts: bool, alternates: bool) -> None:
        self._render = render
        self._texts = texts
        self._alternates = alternates

    def found(self) -> CallHabits:
        if not self._shows([USER], "utterance") or not self._shows([USER, _answer("reply")], "reply"):
            return PLAIN_CALLS
        tools = self._tools()
        one, call = [USER, self._calling(0)], _mark(0)
        if not self._shows(one, call) and not self._shows([*one, _result(0)], call):
            shown = [USER, _answer("reply"), _result(0)]
            return CallHabits(ShownCalls.NONE, tools, no_results=not self._shows(shown, "reply", "outcome0"))
        no_results = not self._shows([*one, _result(0)], "outcome0")
        return CallHabits(
            self._calls(),
            tools,
            apart=not self._alternates and self._is_apart(),
            one_text=self._has_one_text(),
            no_results=no_results,
            no_lone_results=no_results or not self._shows([USER, _result(0)], "outcome0"),
        )

    def _tools(self) -> ToolsAre:
        if self._shows([USER], "probe"):
            return ToolsAre.TOOLS
        text = self._render([USER], (), {XML_TOOLS: [_TOOL]})
        if text is not None and "probe" in text:
            return ToolsAre.XML_TOOLS
        system = {"role": "system", "content": "order", "tools": "[probe]"}
        text = self._render([system, USER], ())
        return ToolsAre.IN_SYSTEM if text is not None and "[probe]" in text else ToolsAre.TOOLS

    def _calls(self) -> ShownCalls:
        both = [USER, self._calling(0, 1), _result(0), _result(1)]
        if self._shows(both, _mark(0), _mark(1)):
            return ShownCalls.ALL
        split = [USER, self._calling(0), _result(0), self._calling(1), _result(1)]
        return ShownCalls.FIRST if self._shows(split, _mark(0), _mark(1)) else ShownCalls.ALL

    def _is_apart(self) -> bool:
        if self._shows([USER, self._calling(0, text="reply")], "reply", _mark(0)):
            return False
        return self._shows([USER, _answer("reply"), self._calling(0)], "reply", _mark(0))

    def _has_one_text(self) -> bool:
        answer = self._calling(0, text="reply")
        refused = self._render([USER, {**answer, "reasoning_content": "ponder"}], (_TOOL,)) is None
        return refused and self._render([USER, answer], (_TOOL,)) is not None

    def _calling(self, *numbers: int, text: str = "") -> dict[str, Any]:
        return {**_answer(text), "tool_calls": [self._call(number) for number in numbers]}

    def _call(self, number: int) -> dict[str, Any]:
        value = f"{_WORD}{number}"
        arguments = f'{{"{_KEY}": "{value}"}}' if self._texts else {_KEY: value}
        return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": value, "arguments": arguments}}

    def _shows(self, messages: _Messages, *words: str) -> bool:
        text = self._render(messages, (_TOOL,))
        return text is not None and all(word in text for word in words)


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _result(number: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"outcome{number}", "tool_call_id": f"abcdefgh{number}"}


def _mark(number: int) -> str:
    """The text by which a call is seen: its name, which is in its arguments too."""
    return f"{_WORD}{number}"
