"""The forms in which the served model writes its answers: found from its own files, or named by options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from services.gateway.text.model_output.answer import AnswerText
from services.gateway.text.model_output.channel_marks import CHANNEL_TEXTS
from services.gateway.text.model_output.channels import ChannelAnswer, Channels, begun_message
from services.gateway.text.model_output.contents import placeholder
from services.gateway.text.model_output.formats import (
    INSERTED,
    REASONING_FORMS,
    START_ANCHORS,
    TOOL_FORMS,
    CallForm,
    ReasoningForm,
    ToolForm,
)
from services.gateway.text.model_output.parser import ParserTables
from services.gateway.text.model_output.template import Field, Part, ResponseTemplate, load_template
from services.gateway.text.model_output.told import Answer, Schemas

AUTO, NONE = "auto", "none"  # as the name of a parser: found from the model's files; switched off
HARMONY = "harmony"  # the form of answers in channels, of calls and reasoning together
_PLAIN: Mapping[str, Any] = {}
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class AnswerForms:
    """The forms of a model's answers.

    template: of all answers. form: of calls, for grammars; None: no grammar can be made of it. call_ids: see ToolForm.
    inserted: the model's chat template knows no tools, so that a text about them is inserted.
    channels: answers are in channels, and the template has no marks.
    """

    template: ResponseTemplate
    form: CallForm | None = None
    call_ids: int = 0
    inserted: bool = False
    channels: Channels | None = None

    @property
    def calls(self) -> bool:
        """True when calls of tools can be told apart."""
        return self.template.field_of(Part.CALLS) is not None or (self.channels is not None and self.channels.calls)

    @property
    def reasons(self) -> bool:
        """True when there is reasoning that can be told apart."""
        return self.reasoning is not None or (self.channels is not None and self.channels.reasoning)

    @property
    def reasoning(self) -> Field | None:
        """The field of the reasoning; None: there is none, or it is not told apart."""
        return self.template.field_of(Part.REASONING)

    @cached_property
    def with_calls(self) -> ParserTables:
        """The tables for answers to requests with tools."""
        return ParserTables(self.template)

    @cached_property
    def without_calls(self) -> ParserTables:
        """The tables for answers to other requests."""
        return ParserTables(self.template.only(lambda part: part is not Part.CALLS))

    def begun(self, prompt: str) -> str:
        """Returns the part of the assistant's message that a prompt has, which the answer goes on."""
        if self.channels is not None:
            return begun_message(prompt)
        if not self.reasons and not self.calls:
            return ""
        return self._with_opening(self.template.begun(prompt))

    def _with_opening(self, begun: str) -> str:
        """Puts the mark that opens reasoning before one that closes it: prompts of DeepSeek-V3.1 begin with that."""
        field = self.reasoning
        if field is None or field.open is None or field.close is None or not field.open.literals:
            return begun
        return field.open.literals[0] + begun if begun.lstrip().startswith(field.close.literals) else begun

    def answer(self, begun: str, schemas: Schemas | None, *, keeps_end: bool = False, spelled: bool = False) -> Answer:
        """Returns an answer that goes on `begun`.

        schemas: of the tools that it may call; None: calls are not told apart. keeps_end: see AnswerText. spelled: see
        ChannelAnswer.
        """
        if self.channels is not None:
            channels = self.channels if schemas is not None else replace(self.channels, calls=False)
            return ChannelAnswer(channels, begun, schemas, spelled=spelled)
        tables = self.without_calls if schemas is None else self.with_calls
        return AnswerText(tables, begun, schemas, keeps_end=keeps_end)


NO_FORMS = AnswerForms(load_template({"start_anchor": START_ANCHORS, "fields": {"content": _PLAIN}}))


def find_forms(
    spec: object | None,
    chat_template: str | None,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    *,
    tool_template: str | None = None,
) -> AnswerForms:
    """Returns the forms of a model. Raises TemplateSpecError.

    spec: its `response_template`, where it has one. chat_template: its source. tool_parser, reasoning_parser: names of
    forms of ours, which win. tool_template: the source for requests with tools, where that is another.
    """
    own = None if spec is None else load_template(spec)
    source = tool_template or chat_template or ""
    if _in_channels(own, source, tool_parser, reasoning_parser):
        calls = tool_parser == HARMONY or (tool_parser == AUTO and _TOOLS.search(source) is not None)
        return replace(NO_FORMS, channels=Channels(calls=calls, reasoning=reasoning_parser != NONE))
    inserted = chat_template is not None and _TOOLS.search(source) is None and tool_parser != NONE
    tools = _tool_form(own, source, tool_parser, inserted=inserted)
    reasoning = _reasoning_form(own, (chat_template or "") + source, reasoning_parser)
    written: Mapping[str, Any] = (
        spec if isinstance(spec, Mapping) else {"start_anchor": START_ANCHORS, "fields": {"content": _PLAIN}}
    )
    fields = dict(written["fields"])
    if own is not None:
        drop = {Part.CALLS: tool_parser != AUTO or inserted, Part.REASONING: reasoning_parser != AUTO}
        for field in own.fields:
            if drop.get(field.part, False) and field.open is not None:
                del fields[field.name]
    if tools is not None:
        fields["tool_calls"] = tools.field
    if reasoning is not None:
        fields["reasoning_content"] = reasoning.field
    template = load_template({**written, "fields": fields})
    if template.field_of(Part.CALLS) is None:
        return AnswerForms(template)
    if tools is not None:
        return AnswerForms(template, tools.form, tools.call_ids, inserted)
    known = _known(source)
    form = _form_of(template.field_of(Part.CALLS)) or (None if known is None else known.form)
    return AnswerForms(template, form, 0 if known is None else known.call_ids)


def _in_channels(own: ResponseTemplate | None, source: str, tool_parser: str, reasoning_parser: str) -> bool:
    named = {tool_parser, reasoning_parser} - {AUTO, NONE}
    if named:
        return named == {HARMONY}
    return own is None and all(text in source for text in CHANNEL_TEXTS)


def _tool_form(own: ResponseTemplate | None, source: str, name: str, *, inserted: bool) -> ToolForm | None:
    """The form of ours that calls have; None: there is none, or the model's own template says."""
    if name != AUTO:
        return None if name == NONE else TOOL_FORMS[name]
    if inserted:
        return TOOL_FORMS[INSERTED]
    if (own is not None and own.field_of(Part.CALLS) is not None) or not source:
        return None
    return _known(source)


def _known(source: str) -> ToolForm | None:
    for form in TOOL_FORMS.values():
        if any(text in source for text in form.known_by) and not any(text in source for text in form.unless):
            return form
    return None


def _reasoning_form(own: ResponseTemplate | None, source: str, name: str) -> ReasoningForm | None:
    if name != AUTO:
        return None if name == NONE else REASONING_FORMS[name]
    if own is not None and own.field_of(Part.REASONING) is not None:
        return None
    forms = REASONING_FORMS.values()
    return next((form for form in forms if any(text in source for text in form.known_by)), None)


def _form_of(field: Field | None) -> CallForm | None:
    """Returns how calls are written by a model's own template, where that follows from it: one object between marks."""
    if field is None or field.open is None or field.close is None:
        return None
    if not field.open.literals or not field.close.literals or field.spec.get("content") != "json":
        return None
    shape = field.spec.get("transform")
    function = shape.get("function") if isinstance(shape, Mapping) else None
    name, arguments = ("name", "arguments") if function == "{content}" else _keys(function)
    if not name or field.spec.get("content_args") or field.spec.get("transform_each"):
        return None
    opening, closing = field.open.literals[0], field.close.literals[0]
    return CallForm(before=opening + "\n", after="\n" + closing, name=name, arguments=arguments)


def _keys(function: object) -> tuple[str, str]:
    """The keys of name and arguments in a call's object, where a transform takes them from there."""
    if not isinstance(function, Mapping):
        return "", ""
    name, arguments = placeholder(function.get("name")), placeholder(function.get("arguments"))
    if len(name) != 2 or len(arguments) != 2 or name[0] != "content" or arguments[0] != "content":
        return "", ""
    return name[1], arguments[1]
