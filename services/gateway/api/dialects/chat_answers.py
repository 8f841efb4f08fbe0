"""Tools and reasoning of one model: which requests it can answer, and how prompt and answer are made."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.api.answers.reading import MarkTokens, Reading
from services.gateway.api.errors import invalid, unsupported
from services.gateway.api.grammars.answer_grammar import ReasoningFirst, WantedAnswer, answer_grammar
from services.gateway.api.grammars.channel_grammar import channel_grammar
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.message_request import MessageRequest
from services.gateway.api.requests.tools import as_values, custom_names, schemas
from services.gateway.text.chat_template import ChatTemplate, reads, reads_variable
from services.gateway.text.histories import with_results_in_order
from services.gateway.text.inserted_tools import with_tools
from services.gateway.text.model_output.channels import ChannelAnswer
from services.gateway.text.model_output.formats import CallForm
from services.gateway.text.model_output.forms import NO_FORMS, AnswerForms
from services.gateway.text.tokenizer import Tokenizer

_TAIL = 1 << 16  # characters at the end of a prompt in which the assistant's message begins
_THINKING = "enable_thinking"  # the variable by which many templates switch reasoning off
_OTHER_THINKING = "thinking"  # by which those of DeepSeek-V3.1 and Granite switch it on

# Efforts that templates seldom know, and the next ones that all know which read any.
_COMMON_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The chats of a model: the template of its prompts, where it has one, and the forms of its answers."""

    template: ChatTemplate | None
    forms: AnswerForms = NO_FORMS


class ChatAnswers:
    """Tools and reasoning of the served model."""

    def __init__(self, model: ChatModel, tokenizer: Tokenizer) -> None:
        self._forms = model.forms
        self._tokenizer = tokenizer
        self._marks = MarkTokens(model.forms, tokenizer)

    @property
    def call_form(self) -> CallForm | None:
        """The form in which the model writes calls; None: it is not known."""
        return self._forms.form

    def check(self, request: MessageRequest) -> None:
        """Raises ApiError for a request that this model cannot answer."""
        if request.own_tools and not self._forms.calls:
            words = "how this model writes calls is not known, or switched off; see the gateway's --tool-parser."
            raise unsupported("tools", f"'tools' is not supported with this model: {words}")
        if request.ignore_eos and self.constrains(request):
            raise invalid("'ignore_eos' excludes calls and reasoning that a grammar bounds.", "ignore_eos")

    def ignored(self, request: MessageRequest, template: str) -> Iterator[str]:
        """Yields the fields of a request that this model does not act on with the template of this text."""
        effort = request.reasoning_effort
        done_by_us = effort == "none" and (not self._forms.reasons or self._forms.channels is not None)
        if effort is not None and not done_by_us and not _reads_effort(template):
            yield "reasoning_effort"
        if request.thinking_token_budget is not None and not self._forms.reasons:
            yield "thinking_token_budget"

    def variables(self, request: MessageRequest, template: str) -> dict[str, Any]:
        """The variables of the chat template of this text that the request's effort sets."""
        effort = request.reasoning_effort
        if effort is None or not _reads_effort(template):
            return {}
        if effort == "none" and self._forms.channels and not reads(template, _THINKING):
            return {"reasoning_effort": "low"}  # a grammar leaves the analysis out: see _budget_of_channels
        reasons = effort != "none"
        named = {_OTHER_THINKING: reasons} if reads_variable(template, _OTHER_THINKING) else {}
        return {"reasoning_effort": _known_effort(effort, template), _THINKING: reasons, **named}

    def tools(self, request: MessageRequest) -> list[dict[str, Any]]:
        """The tools that the chat template gets."""
        return [] if self._forms.inserted else as_values(request.callable_tools)

    def messages(self, request: MessageRequest, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages that the chat template gets: where it knows no tools, they are written out."""
        with_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if with_calls:
            messages = with_results_in_order(messages, self._forms.call_ids)
        if not self._forms.inserted:
            return messages
        if not request.callable_tools and not with_calls:
            return messages
        return with_tools(messages, as_values(request.callable_tools))

    def begun(self, prompt: str) -> str:
        """Returns the part of the assistant's message that a prompt has, which the answer goes on."""
        return self._forms.begun(prompt[-_TAIL:])

    def reading(self, request: MessageRequest, begun: str) -> Reading | None:
        """Returns how the answers are told apart, which go on `begun`; None: all of their text is content."""
        tools = request.callable_tools
        if not tools and not self._forms.reasons and self._forms.channels is None:
            return None
        start = self._forms.answer(
            begun, schemas(tools) if tools else None, keeps_end=request.asks_for_a_form, spelled=self._marks.spelled
        )
        return Reading(
            start=start,
            marks=self._marks.of(with_calls=bool(tools)),
            written=self._marks.written,
            call_ids=self._forms.call_ids,
            single_call=bool(tools) and request.one_call,
            shows_reasoning=request.include_reasoning is not False,
            inserted=bool(tools) and self._forms.inserted,
            custom=custom_names(tools),
            reasons=self._forms.reasons,
        )

    def _budget(self, request: MessageRequest) -> int | None:
        """The largest number of tokens of the reasoning; None: any, or there is no reasoning."""
        if not self._forms.reasons:
            return None
        return _budget_of_channels(request) if self._forms.channels else request.thinking_token_budget

    def constrains(self, request: MessageRequest) -> bool:
        """See Dialect."""
        if request.asks_for_a_form or self._budget(request) is not None:
            return True
        return bool(request.callable_tools) and self._wanted(request, "", None).constrained

    def grammar(self, request: MessageRequest, reading: Reading | None) -> tuple[str, str]:
        """See Dialect."""
        form, param = grammar_of(request.response_format, request.structured_outputs, self._tokenizer.marks)
        reasoning = self._reasoning_first(request, reading)
        wanted = self._wanted(request, form, reasoning)
        if wanted.must_call and wanted.form:  # a form is that of the content, and there is none
            wanted = replace(wanted, form="")
        if reading is not None and isinstance(reading.start, ChannelAnswer):
            return self._in_channels(request, wanted, reading.start, param)
        if wanted.form and self._forms.template.other_text is None:
            words = "its response template marks the text of answers, of which no grammar can be made."
            raise unsupported(param, f"'{param}' is not supported with this model: {words}")
        if not wanted.constrained or (not wanted.tools and reasoning is None):
            return form, param
        tools = wanted.must_call or wanted.strict
        return answer_grammar(wanted, self._tokenizer), "tools" if tools else param or "thinking_token_budget"

    def _in_channels(
        self, request: MessageRequest, wanted: WantedAnswer, answer: ChannelAnswer, param: str
    ) -> tuple[str, str]:
        param = "tools" if wanted.must_call or wanted.strict else param or "thinking_token_budget"
        return channel_grammar(wanted, answer, self._budget(request), self._tokenizer, param), param

    def _wanted(self, request: MessageRequest, form: str, reasoning: ReasoningFirst | None) -> WantedAnswer:
        return WantedAnswer(
            tools=request.callable_tools,
            choice=request.tool_choice,
            one_call=request.one_call,
            call_form=self._forms.form,
            form=form,
            reasoning=reasoning,
        )

    def _reasoning_first(self, request: MessageRequest, reading: Reading | None) -> ReasoningFirst | None:
        """The reasoning that may come before the answer; None: there is none, or the prompt has ended it."""
        field = self._forms.reasoning
        if field is None or field.close is None or reading is None:
            return None
        if not (field.open and field.open.literals and field.close.literals):
            words = "the marks of this model's reasoning are patterns, of which no grammar can be made."
            raise unsupported("thinking_token_budget", f"This request is not supported with this model: {words}")
        answer = reading.start
        if answer.reasoned and not answer.reasons:
            return None
        return ReasoningFirst(field=field, begun=answer.reasons, budget=self._budget(request))


def _budget_of_channels(request: MessageRequest) -> int | None:
    """The largest number of tokens of the analysis: templates with channels know no way to switch it off."""
    if request.thinking_token_budget is None and request.reasoning_effort == "none":
        return 0
    return request.thinking_token_budget


def _reads_effort(template: str) -> bool:
    known = reads(template, "reasoning_effort") or reads(template, _THINKING)
    return known or reads_variable(template, _OTHER_THINKING)


def _known_effort(effort: str, template: str) -> str:
    """Returns the effort under a name that the template knows."""
    return effort if reads(template, effort) else _COMMON_EFFORTS.get(effort, effort)
