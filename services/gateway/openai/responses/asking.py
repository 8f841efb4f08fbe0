"""A request for a response: read, checked, put together with what is kept, and made a chat."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.large_json import takes_long
from services.gateway.api.requests.validation import ignored_fields, parse_request
from services.gateway.api.runners import Runners
from services.gateway.api.served_models import Resolved, ServedModel
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.conversations import Conversations
from services.gateway.openai.responses.fitting import Fitting
from services.gateway.openai.responses.items import Item, ToolsItem, num_parts
from services.gateway.openai.responses.kept import FEW_PARTS, KeptResponses
from services.gateway.openai.responses.offered_tools import OfferedTool, OfferedTools, offered
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.translation import ResponseChat, chat_of, in_words_of_responses, own_name


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with the conversation that it continues, its model, the tools that the model is offered, and the chat
    of these.

    long: it takes long to go through.
    """

    request: ResponsesRequest
    conversation: Sequence[Item]
    model: ServedModel
    tools: OfferedTools
    chat: ResponseChat
    long: bool

    @property
    def resolved(self) -> Resolved[ChatRequest]:
        """The chat with its model."""
        return Resolved(self.chat, self.model)

    def chat_of(self, items: Sequence[Item]) -> ResponseChat:
        """Returns the chat with these items alone. Raises ApiError."""
        return chat_of(self.request, items, self.tools)


class Asking:
    """Reads requests."""

    def __init__(self, runners: Runners, limits: Limits, kept: KeptResponses) -> None:
        self._runner = runners.of(ChatRequest)
        self._side = runners.side
        self._limits = limits
        self._conversations = Conversations(kept)
        self._fitting = Fitting(self._runner, runners.side)

    async def read(self, exchange: Exchange) -> Asked:
        """Reads the request of an exchange. Raises ApiError, ClientGone."""
        body = await exchange.read_json(self._limits.max_body_bytes)
        long = takes_long(body)
        request = await self._side.run_if(long, self._request, body)
        del body
        exchange.take_request_id(request.request_id)
        conversation = await self._conversations.of(request, exchange.caller.tenant)
        long = long or num_parts(conversation) > FEW_PARTS
        asked, ignored = await self._side.run_if(long, self._asked, request, conversation, long)
        exchange.record.note_ignored_fields(ignored)
        return await self._fitted(asked, exchange) if request.truncation == "auto" else asked

    def _request(self, body: bytes) -> ResponsesRequest:
        request = parse_request(body, ResponsesRequest, RESPONSES_NEUTRAL)
        self._runner.models.resolve(request.model)
        request.check_combinations()
        return request

    def _asked(
        self, request: ResponsesRequest, conversation: Sequence[Item], long: bool
    ) -> tuple[Asked, tuple[str, ...]]:
        """Returns what is asked, and the names of ignored fields. Raises ApiError."""
        tools = offered_tools(request, conversation)
        chat = chat_of(request, conversation, tools)
        with in_words_of_responses(tools):
            model = self._runner.check(chat).model
        of_chat = (own_name(name, tools) for name in self._runner.dialect.ignored_fields(chat))
        ignored = ignored_fields((*request.unknown_fields(), *of_chat), self._limits.strict_fields)
        return Asked(request, conversation, model, tools, chat, long), ignored

    async def _fitted(self, asked: Asked, exchange: Exchange) -> Asked:
        with in_words_of_responses(asked.tools):
            chat = await self._fitting.fitted(
                asked.conversation, asked.chat, asked.chat_of, exchange.record, exchange.caller
            )
        return replace(asked, chat=chat)


def offered_tools(request: ResponsesRequest, conversation: Sequence[Item]) -> OfferedTools:
    """Returns the request's tools, and others that items of the conversation add."""
    tools = [*offered(request.tools or (), "tools")]
    by_name = {tool.name: tool for tool in tools}
    own = {id(item): f"input[{number}].tools" for number, item in enumerate(request.input)}
    added: list[OfferedTool] = []
    for item in conversation:
        if isinstance(item, ToolsItem):
            added += offered(item.tools, own.get(id(item), "input"))
    for tool in added:
        if by_name.setdefault(tool.name, tool) is tool:
            tools.append(tool)
    return OfferedTools(tools, request.tool_choice)
