"""Response templates: data that say how a model marks the parts of its answers.

The format is the `response_template` of `tokenizer_config.json`, a standard of `transformers`
(https://huggingface.co/docs/transformers/chat_response_parsing): fields, each with the mark that opens it and the mark
that closes it. The one field without an opening mark has all text that no other field has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import regex

from services.gateway.text.model_output.contents import CONTENTS

_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
        "leads",  # ours: the field is not opened any more after other text
    }
)


class TemplateSpecError(Exception):
    """A response template that cannot be followed. The message says what is wrong with it."""


class Part(Enum):
    """The part of a message that a field is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "tool_calls"


_PARTS = {
    "tool_calls": Part.CALLS,
    "reasoning_content": Part.REASONING,
    "reasoning": Part.REASONING,
    "thinking": Part.REASONING,
}


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A text that opens or closes a field.

    literals: the texts that it may be; empty: the pattern alone says.
    may_grow: a match that ends where the text so far ends may still become a longer one.
    """

    pattern: "regex.Pattern[str]"
    literals: tuple[str, ...]
    may_grow: bool


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field of a template. open: None for the field of all other text. close: None: until the answer's end.

    spec: the field as it is written in the template.
    """

    name: str
    part: Part
    open: Mark | None
    close: Mark | None
    spec: Mapping[str, Any]

    @property
    def leads(self) -> bool:
        """True when the field is opened only where nothing but white space is before it, or other fields."""
        return bool(self.spec.get("leads"))


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """A checked template. start: ends where the assistant's message begins in a prompt."""

    fields: tuple[Field, ...]
    start: "regex.Pattern[str]"

    @property
    def other_text(self) -> Field | None:
        """The field that has all text which no other field has; None: such text is no part of the message."""
        return next((field for field in self.fields if field.open is None), None)

    def field_of(self, part: Part) -> Field | None:
        """The first field that is this part of a message."""
        return next((field for field in self.fields if field.part is part and field.open is not None), None)

    def only(self, wanted: Callable[[Part], bool]) -> "ResponseTemplate":
        """Returns the template without the marked fields of other parts, whose text is then like any other."""
        return replace(self, fields=tuple(each for each in self.fields if each.open is None or wanted(each.part)))

    def begun(self, prompt: str) -> str:
        """Returns what a prompt already has of the assistant's message."""
        end = None
        for found in self.start.finditer(prompt):
            end = found.end()
        return "" if end is None else prompt[end:]

    def shows(self, token: str) -> bool:
        """True when a special token with this text can be a mark, or a part of one."""
        marks = [mark for field in self.fields for mark in (field.open, field.close) if mark is not None]
        return any(any(token in text for text in mark.literals) or _names(mark, token) for mark in marks)


def load_template(spec: object) -> ResponseTemplate:
    """Returns the template of a `response_template`. Raises TemplateSpecError."""
    if not isinstance(spec, Mapping):
        raise TemplateSpecError("it must be an object")
    if spec.get("version", 1) != 1:
        raise TemplateSpecError(f"version {spec['version']!r} is not known")
    if unknown := sorted(set(spec) - _KEYS):
        raise TemplateSpecError(f"'{unknown[0]}' is not known")
    written = spec.get("fields")
    if not isinstance(written, Mapping) or not written:
        raise TemplateSpecError("'fields' must be an object that is not empty")
    fields = tuple(_field(name, each) for name, each in written.items())
    if sum(field.open is None for field in fields) > 1:
        raise TemplateSpecError("only one field may lack 'open' and 'open_pattern'")
    start = _mark(spec, "start_anchor", "the template")
    if start is None:
        raise TemplateSpecError("it lacks 'start_anchor' and 'start_anchor_pattern'")
    return ResponseTemplate(fields, start.pattern)


def _field(name: str, spec: object) -> Field:
    where = f"field '{name}'"
    if not isinstance(spec, Mapping):
        raise TemplateSpecError(f"{where} must be an object")
    if unknown := sorted(set(spec) - _FIELD_KEYS):
        raise TemplateSpecError(f"{where} has '{unknown[0]}', which is not known")
    if (content := spec.get("content", "text")) not in CONTENTS:
        raise TemplateSpecError(f"{where} has the content {content!r}, which is not known")
    return Field(name, _PARTS.get(name, Part.CONTENT), _mark(spec, "open", where), _mark(spec, "close", where), spec)


def _mark(spec: Mapping[str, Any], key: str, where: str) -> Mark | None:
    texts, pattern = spec.get(key), spec.get(f"{key}_pattern")
    if texts is not None and pattern is not None:
        raise TemplateSpecError(f"{where} has both '{key}' and '{key}_pattern'")
    if pattern is not None:
        return Mark(_compiled(pattern, f"{where}, '{key}_pattern'"), (), may_grow=True)
    if texts is None:
        return None
    literals = [texts] if isinstance(texts, str) else texts
    if not isinstance(literals, list) or not literals or not all(isinstance(each, str) and each for each in literals):
        raise TemplateSpecError(f"{where}, '{key}': it must be a text, or a list of texts, none of them empty")
    longest_first = sorted(set(literals), key=len, reverse=True)
    grows = any(one != other and one.startswith(other) for one in literals for other in literals)
    return Mark(_compiled("|".join(map(regex.escape, longest_first)), where), tuple(longest_first), grows)


def _compiled(pattern: object, where: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(str(pattern), regex.DOTALL)
    except regex.error as error:
        raise TemplateSpecError(f"{where}: {error}") from error


def _names(mark: Mark, token: str) -> bool:
    """True when a pattern has the text of a special token in it, as it is or escaped."""
    written = mark.pattern.pattern
    by_hand = regex.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", token)
    return token in written or regex.escape(token) in written or by_hand in written
