"""Families of models: what a prompt of theirs looks like, and how they write calls.

templates/ has a chat template for each, of our own words and of the family's structure: which roles it knows, where
tools and results stand, what it takes for an error.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gateway.tokenizer_files import CHATML

TEMPLATES = Path(__file__).parent / "templates"
NO_THOUGHT = "</think>\n\n"  # how a prompt ends that wants no reasoning
_THOUGHT = "I follow the plan."
Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    calls: writes calls. text, thought: how an answer's text and its reasoning are written; no thought: there is none.
    user, end: marks around a user's turn. result: the mark before a tool's result. tool: what a prompt has for a tool.
    template: None: one that knows no tools. response_template: the model's own, as in tokenizer_config.json.
    """

    name: str
    calls: Callable[[Calls], str]
    text: str = "{text}"
    thought: str = ""
    user: str = "<|im_start|>user\n"
    end: str = "<|im_end|>"
    result: str = "<tool_response>\n"
    tool: str = '"name": "{name}"'
    template: str | None = None
    response_template: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        """The chat template."""
        return CHATML if self.template is None else (TEMPLATES / self.template).read_text()

    def write(self, text: str, calls: Calls, *, thinks: bool) -> str:
        """Writes an answer."""
        parts = [self.thought.replace("{text}", _THOUGHT) if thinks else ""]
        parts += [self.text.replace("{text}", text)] if text else []
        return "".join([*parts, self.calls(calls) if calls else ""])


def _json(value: object) -> str:
    """Writes JSON as models do."""
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    texts = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _tagged(calls: Calls) -> str:
    return "\n".join(_tagged_call(name, arguments) for name, arguments in calls)


def _tagged_call(name: str, arguments: Arguments) -> str:
    texts = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
    tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def _llama(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _in_channels(calls: Calls) -> str:
    ((name, arguments),) = calls  # a message has one
    return f"<|channel|>commentary to=functions.{name}<|message|>{_json(arguments)}<|call|>"


_CHANNELS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[^<\s]+)<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}

_HARMONY = Family(
    "harmony",
    _in_channels,
    text="<|channel|>final<|message|>{text}<|end|>",
    thought="<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
    user="<|start|>user<|message|>",
    end="<|end|>",
    result=" to=assistant<|channel|>commentary<|message|>",
    tool="type {name} = (",
    template="channels.jinja",
)

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", _hermes, thought="<think>\n{text}\n</think>\n\n", template="qwen3.jinja"),
        Family("qwen3-coder", _tagged, tool="<name>{name}</name>", template="qwen3-coder.jinja"),
        Family(
            "llama3",
            _llama,
            user="<|start_header_id|>user<|end_header_id|>\n\n",
            end="<|eot|>",
            result="<|start_header_id|>ipython<|end_header_id|>\n\n",
            template="llama3.jinja",
        ),
        Family("mistral", _mistral, user="[INST] ", end="[/INST]", result="[TOOL_RESULTS] ", template="mistral.jinja"),
        replace(_HARMONY, name="channels", response_template=_CHANNELS),
        _HARMONY,
        Family("no-tools", _hermes),
    )
}
