"""The forms in which models of several families write their answers, as data.

A model whose tokenizer has a `response_template` needs none of them. A form is known by a text that a chat template of
such a model has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# What chat templates write before an assistant's message.
START_ANCHORS = [
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|header_start|>assistant<|header_end|>\n\n",
    "<｜Assistant｜>",
    "<|assistant|>\n",
    "<|assistant|>",
    "<|im_start|>assistant<|im_sep|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<start_of_turn>model\n",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
    "\n\nAssistant:",
]

_FUNCTION = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# DeepSeek-V3 and R1 write the type, then the name and a block of JSON; V3.1 writes the name, then JSON.
_DEEPSEEK = {
    "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:"
    r"\w*<｜tool▁sep｜>(?P<name>[^\s<>`{}\[\]]++)\s*+(?:```\w*+\s*+)?+(?=[^\w`])"
    r"|(?P<name>[^\s<>{}\[\]]++)<｜tool▁sep｜>\s*+(?=[{\[<]))",
    # Decided only where no end of all calls may come any more.
    "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>"
    r"|(?=\s*+(?:[^<\s]|<[^｜]|<｜[^t]|<｜tool▁call▁))|\s*\Z)",
    "repeats": True,
    "content": "json",
    "transform": _NAMED,
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which calls are written, for grammars.

    begin, end: around all calls; separator: between two of them. lead: a mark that may come before calls without one.
    before, after: around each call. middle: between the name and its arguments, where a call is no JSON object.
    name, arguments: keys of the call's object. python: calls are written as in Python.
    tagged: each argument is between tags, `<parameter=name>`.
    mark: the mark with which calls begin, where that is not the first word. others: further marks that begin a call.
    """

    begin: str = ""
    end: str = ""
    separator: str = "\n"
    lead: str = ""
    before: str = ""
    middle: str = ""
    after: str = ""
    name: str = "name"
    arguments: str = "arguments"
    python: bool = False
    tagged: bool = False
    mark: str = ""
    others: tuple[str, ...] = ()

    @property
    def trigger(self) -> str:
        """The mark with which calls begin, also after other text."""
        return self.mark or (self.begin + self.before).split()[0]

    @property
    def bare(self) -> bool:
        """True when there is no mark: the first character of the answer says that it is a call."""
        return not self.before and len(self.begin) < 2

    @property
    def first_character(self) -> str:
        """The first character of an answer that is a call."""
        return (self.begin + self.before + "{")[0]


_DEEPSEEK_FORM = CallForm(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    mark="<｜tool▁calls▁begin｜>",
    others=("<｜tool▁call▁begin｜>",),
)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The calls of a family of models.

    field: of a response template. known_by: texts of which a chat template has one; unless: and none of these.
    form: None: no grammar is made of it. call_ids: characters of the ids that its chat templates take; 0: any number.
    """

    field: Mapping[str, Any]
    known_by: tuple[str, ...]
    form: CallForm | None = None
    call_ids: int = 0
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The reasoning of a family of models; see ToolForm."""

    field: Mapping[str, Any]
    known_by: tuple[str, ...]


# The order is that in which chat templates are looked at.
TOOL_FORMS: Mapping[str, ToolForm] = {
    "qwen3-coder": ToolForm(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^<>\s]+)>\n?(?P<value>.*?)\n?</parameter>",
                "tag_end": "</parameter>",
            },
            "transform": _NAMED,
        },
        ("<function=",),
        CallForm(before="<tool_call>\n<function=", middle=">\n", after="</function>\n</tool_call>", tagged=True),
    ),
    "deepseek-v31": ToolForm(
        _DEEPSEEK,
        ("<｜tool▁sep｜>",),
        replace(
            _DEEPSEEK_FORM,
            separator="",
            before="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
        ),
        unless=("```json",),
    ),
    "deepseek-v3": ToolForm(
        _DEEPSEEK,
        ("<｜tool▁sep｜>",),
        replace(
            _DEEPSEEK_FORM,
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
        ),
    ),
    "functools": ToolForm(
        {"open_pattern": r"functools(?=\[)", "content": "json-calls", "transform": _FUNCTION},
        ("functools[",),
        CallForm(begin="functools[", end="]", separator=", "),
    ),
    "phi4-mini": ToolForm(
        {
            "open": "<|tool_call|>",
            "close": "<|/tool_call|>",
            "repeats": True,
            "content": "json-calls",
            "transform": _FUNCTION,
        },
        ("<|/tool_call|>", "<|/tool|>"),
        CallForm(begin="<|tool_call|>[", end="]<|/tool_call|>", separator=", ", mark="<|tool_call|>"),
    ),
    "granite": ToolForm(
        {
            "open": ["<|tool_call|>", "<tool_call>"],
            "close": "</tool_call>",
            "repeats": True,
            "content": "json-calls",
            "transform": _FUNCTION,
        },
        ("<|tool_call|>",),
        CallForm(begin="<|tool_call|>[", end="]", separator=", ", mark="<|tool_call|>", others=("<tool_call>",)),
    ),
    "hermes": ToolForm(
        {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": _FUNCTION},
        ("<tool_call>",),
        CallForm(before="<tool_call>\n", after="\n</tool_call>"),
    ),
    "mistral-args": ToolForm(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
        ("[ARGS]",),
        CallForm(separator="", before="[TOOL_CALLS]", middle="[ARGS]"),
        call_ids=9,
    ),
    "mistral": ToolForm(
        {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        ("[TOOL_CALLS]",),
        CallForm(begin="[TOOL_CALLS] [", end="]", separator=", "),
        call_ids=9,
    ),
    "pythonic": ToolForm(
        {
            "open_pattern": r"\A\s*(?:<\|python_start\|>)?\s*(?=\[\s*[A-Za-z_][\w.\-]*\()",
            "close": "<|python_end|>",
            "content": "python-calls",
            "content_args": {"known_names": True},
        },
        ("[func_name1(", "<|python_start|>"),
        CallForm(begin="[", end="]", separator=", ", lead="<|python_start|>", python=True),
    ),
    "llama3-json": ToolForm(
        {
            "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"(?:name|type|parameters)"\s*:)',
            "content": "json-sequence",
            "content_args": {"known_names": True},
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
        ("<|python_tag|>", '{"name": function name'),
        CallForm(separator="; ", lead="<|python_tag|>", arguments="parameters"),
    ),
}

REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "think": ReasoningForm({"open": "<think>", "close": "</think>", "leads": True}, ("</think>",)),
    "granite": ReasoningForm(
        {"open": "Here is my thought process:", "close": "Here is my response:", "leads": True},
        ("Here is my thought process:",),
    ),
    "mistral-think": ReasoningForm({"open": "[THINK]", "close": "[/THINK]", "leads": True}, ("[THINK]",)),
}

# For models whose chat template knows no tools: the form that most models have seen.
INSERTED = "hermes"
