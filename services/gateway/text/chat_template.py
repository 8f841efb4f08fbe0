"""Chat templates, rendered as `transformers` renders them.

A template comes with the model, so it is foreign code: it runs in Jinja's immutable sandbox and sees plain JSON values
only. A template is compiled once, and every request renders it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from services.gateway.text.template_habits import Habits, find_habits
from services.protocol.model_files.base import ModelError, ModelFiles

# The names under which clients and templates know an earlier answer's reasoning; templates read the first.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# Variables that the gateway itself sets; a request's `chat_template_kwargs` must not.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
)


_ASKS_FOR_ONE = "{{ raise_exception('this model has none; send one as chat_template, or use /v1/completions.') }}"


def reads_variable(source: str, variable: str) -> bool:
    """True when a template's text has a variable of this name, and not only an attribute or a text."""
    return re.search(rf"(?<![.\w'\"]){re.escape(variable)}\b(?!['\"])", source) is not None


def reads(source: str, variable: str) -> bool:
    """True when a template's text has a variable of this name, or another word like it."""
    return re.search(rf"\b{re.escape(variable)}\b", source) is not None


class TemplateError(Exception):
    """The template cannot render these messages. The error's message is meant for the client."""


class ChatTemplate:
    """A compiled template and the special tokens that it may write."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        replaceable: bool = False,
        tool_use: str | None = None,
    ) -> None:
        """replaceable: requests may bring templates of their own, which are no work of this one.

        tool_use: the template for requests with tools.

        Raises jinja2.TemplateSyntaxError.
        """
        self.replaceable = replaceable
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens)
        self._source = source
        self.special_tokens = dict(special_tokens)
        self._template = _environment().from_string(source)

    @property
    def with_tools(self) -> "ChatTemplate":
        """The template for requests with tools."""
        return self._tool_use or self

    @cached_property
    def habits(self) -> Habits:
        """The histories that the template refuses."""
        return find_habits(self._probed)

    def _probed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        try:
            return self.render(messages, tools=tools, kwargs=variables)
        except (TemplateError, RecursionError):
            return None

    @property
    def source(self) -> str:
        """The template's own text."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text. Arguments are plain JSON. Raises TemplateError."""
        prepared = [_with_reasoning(message) for message in messages]
        if continue_final_message:
            prepared[-1] = self._marked(prepared[-1])
        variables = {**self.special_tokens, **(kwargs or {})}
        try:
            text = self._template.render(
                messages=prepared,
                tools=list(tools) or None,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # any error of the template's own code
            if type(error) is jinja2.TemplateError:  # in the template's words: see `_raise`
                words = f"The model's chat template refuses these messages: {error.message}"
                raise TemplateError(words) from error
            raise TemplateError("The model's chat template cannot render these messages.") from error
        return _cut_at_mark(text, messages[-1]["content"]) if continue_final_message else text

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        if "content" not in self._source:
            raise TemplateError("The model's chat template cannot continue a message.")
        return {**message, "content": message["content"] + _CONTINUE_MARK}


def load_chat_template(
    files: ModelFiles, special_tokens: Mapping[str, str], path: str | None = None, *, replaceable: bool = False
) -> ChatTemplate | None:
    """Returns the template in the file at `path`, or else the model's own; None: there is none. Raises ModelError.

    As in `transformers`, a model's own template that is named `tool_use` is for requests with tools.

    replaceable: see ChatTemplate.
    """
    where = files.path if path is None else path
    source, tool_use = (files.chat_template(), files.tool_template()) if path is None else (_read(path), None)
    if source is None and not replaceable:
        return None
    try:
        source = _ASKS_FOR_ONE if source is None else source
        return ChatTemplate(source, special_tokens, replaceable=replaceable, tool_use=tool_use)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"{where}: the chat template has a syntax error in line {error.lineno}: {error.message}"
        ) from error
    except RecursionError as error:
        raise ModelError(f"{where}: the chat template is nested too deeply") from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from error


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _cut_at_mark(text: str, final_content: str) -> str:
    """Returns the text up to the end of the last message's content, without what the template puts after a message."""
    mark = _CONTINUE_MARK.strip()
    if mark not in text or final_content.strip() not in text:
        raise TemplateError("The model's chat template cannot continue a message.")
    head = text[: text.rindex(mark)]
    # The mark ends in a space: a template that strips its messages has then stripped the message's own end too.
    return head if text[len(head) :].startswith(_CONTINUE_MARK) else head.rstrip()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training. Only renders its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
