"""Chats as the text of their prompts: by the model's chat template, or by one that the request brings.

The model's template was chosen by who runs the gateway, and renders here. A request's own template is code of its
client's, and variables that a client gives to the model's template may be more than its author thought of (a number of
repetitions, a list that is gone through twice): both are rendered by a job, in a process that has limits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.api.dialects.chat_answers import ChatAnswers, ChatModel
from services.gateway.api.errors import ApiError, invalid, unavailable, unsupported
from services.gateway.api.requests.chat import ChatRequest, Message
from services.gateway.api.side_thread import SideThread
from services.gateway.side.frames import JobEnd, JobKind
from services.gateway.side.processes import LONGEST_S, MEMORY_BYTES, JobFailed, NoJobs, SideProcesses
from services.gateway.text.called_histories import placed_tools, with_calls_shown
from services.gateway.text.chat_template import RESERVED_KWARGS, ChatTemplate, TemplateError
from services.gateway.text.histories import fitted

_FEW_PARTS = 128  # messages, and parts of their content, that are rendered in a millisecond or two
_PLAIN_CHARS = 256  # of a variable's text
_PLAIN_NUMBER = 1000

_ROLES = {"developer": "system", "function": "tool"}  # roles by newer or older names, as templates call them

_TOO_COSTLY = {
    JobEnd.TIME: f"it takes longer than {LONGEST_S:g} s to render it.",
    JobEnd.SIZE: "it renders to more text than any prompt may have.",
    JobEnd.DIED: f"it takes more than {MEMORY_BYTES >> 20} MiB to render it.",
}


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A template with all that it renders. field: the request's field at fault where that takes too much."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    source: str | None  # the request's own template
    field: str

    def here(self) -> str:
        """Returns the text. Raises ApiError."""
        try:
            return self.template.render(self.messages, **self.options)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error
        except RecursionError as error:  # tools and calls become JSON in the prompt
            raise _too_deep() from error


class ChatTexts:
    """Renders chats."""

    def __init__(self, model: ChatModel, answers: ChatAnswers, side: SideThread, processes: SideProcesses) -> None:
        self._template = model.template
        self._answers = answers
        self._side = side
        self._processes = processes
        if self._template is not None:  # they are found now, so that no request pays for it
            _ = self._template.habits, self._template.with_tools.habits

    def ignored_fields(self, request: ChatRequest) -> Iterator[str]:
        """Yields the fields that the model does not act on with the template that renders this chat."""
        if self._template is not None:
            yield from self._answers.ignored(request, self._source(self._template, request))

    async def render(self, request: ChatRequest, tenant: str) -> str:
        """Returns the prompt of a chat as text. Raises ApiError."""
        num_parts = len(request.messages) + sum(len(message.content or ()) for message in request.messages)
        variables = request.chat_template_kwargs or {}
        if request.chat_template is not None or not all(map(_is_plain, variables.values())):
            return await self._by_job(await self._side.run(self._prepare, request), tenant)
        costly = variables or request.documents or request.tools
        return await self._side.run_if(num_parts > _FEW_PARTS or bool(costly), self._render_here, request)

    def _render_here(self, request: ChatRequest) -> str:
        return self._prepare(request).here()

    async def _by_job(self, rendering: _Rendering, tenant: str) -> str:
        template = rendering.template
        job = {
            "source": template.source if rendering.source is None else rendering.source,
            "special_tokens": template.special_tokens,
            "messages": rendering.messages,
            "options": rendering.options,
        }
        try:
            answer = await self._processes.do(JobKind.TEMPLATE, job, tenant)
        except JobFailed as error:
            raise _invalid_field(rendering.field, _TOO_COSTLY[error.end]) from error
        except NoJobs as error:
            raise unavailable("The chat template cannot be rendered now. Try again later.", 1) from error
        except TypeError as error:
            raise _not_json(rendering, error) from error
        if "text" in answer:
            return answer["text"]
        if answer["in"] == "template":
            raise _invalid_field(rendering.field, answer["error"])
        raise invalid(answer["error"], "messages")

    @staticmethod
    def _source(template: ChatTemplate, request: ChatRequest) -> str:
        """Returns the text of the template that renders this chat."""
        if request.chat_template is not None:
            return request.chat_template
        return (template.with_tools if request.callable_tools else template).source

    def _prepare(self, request: ChatRequest) -> _Rendering:
        if self._template is None:
            raise invalid("This model has no chat template; use /v1/completions.", "messages")
        template, kwargs = self._template, request.chat_template_kwargs or {}
        if request.chat_template is not None and not template.replaceable:
            words = "'chat_template' is taken from requests only where the server has --trust-request-chat-template."
            raise unsupported("chat_template", words)
        if request.callable_tools:
            template = template.with_tools
        self._answers.check(request)
        if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
            raise invalid(f"'{reserved[0]}' cannot be given to the chat template.", "chat_template_kwargs")
        continued = bool(request.continue_final_message)
        prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
        try:
            messages = self._messages(request, template)
        except RecursionError as error:  # tools and calls become JSON in the prompt
            raise _too_deep() from error
        tools: Sequence[Mapping[str, Any]] = self._answers.tools(request)
        more_tools: Mapping[str, Any] = {}
        if request.chat_template is None:
            messages, tools, more_tools = placed_tools(messages, tools, template.habits.called)
        options = {
            "tools": tools,
            "add_generation_prompt": prompted,
            "continue_final_message": continued,
            "documents": request.documents,
            "kwargs": {**self._answers.variables(request, self._source(template, request)), **more_tools, **kwargs},
        }
        field = "chat_template_kwargs" if request.chat_template is None else "chat_template"
        return _Rendering(template, messages, options, request.chat_template, field)

    def _messages(self, request: ChatRequest, template: ChatTemplate) -> Sequence[Mapping[str, Any]]:
        """Returns the messages that the template gets. One that a request brings gets them as they are."""
        messages = self._answers.messages(request, [_as_dict(message) for message in request.messages])
        if request.chat_template is not None:
            return messages
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages = with_calls_shown(messages, template.habits.called, self._answers.call_form)
        return fitted(messages, template.habits)


def _is_plain(value: object) -> bool:
    """True for a variable that says yes or no, or names something: it makes no template take long."""
    if isinstance(value, int | float):
        return abs(value) <= _PLAIN_NUMBER
    return value is None or (isinstance(value, str) and len(value) <= _PLAIN_CHARS)


def _too_deep() -> ApiError:
    return invalid("Invalid 'messages': they, or the 'tools', are nested too deeply.", "messages")


def _not_json(rendering: _Rendering, error: TypeError) -> ApiError:
    """400: something that the template is to render cannot be written as JSON. Names the field."""
    options = rendering.options
    fields = {"chat_template_kwargs": options["kwargs"], "tools": options["tools"], "documents": options["documents"]}
    field = next((name for name, value in fields.items() if not _is_json(value)), "messages")
    reason = "it is nested too deeply." if "ecursion" in str(error) else "it cannot be written as JSON."
    return _invalid_field(field, reason)


def _is_json(value: object) -> bool:
    try:
        orjson.dumps([[value]])  # as deep as it is in a job
    except TypeError:
        return False
    return True


def _invalid_field(field: str, reason: str) -> ApiError:
    return invalid(f"Invalid '{field}': {reason}", field, "invalid_value")


def _as_dict(message: Message) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role)
    calls = [call.as_value() for call in message.calls]
    extra = {
        "name": message.name,
        **message.thoughts,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": role, "content": message.text, **{key: value for key, value in extra.items() if value is not None}}
