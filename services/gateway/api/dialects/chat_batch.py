"""Batches of chats: one request with several conversations, each of which gets a choice."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api.answers.choice import PromptShown
from services.gateway.api.dialects.chat import ChatDialect
from services.gateway.api.dialects.prompts import Prompt
from services.gateway.api.errors import invalid
from services.gateway.api.requests.chat import MAX_MESSAGES, ChatRequest, Message
from services.gateway.api.requests.message_request import MessageRequest
from services.gateway.api.requests.schema import whole

MAX_CONVERSATIONS = 1024

_Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class BatchChatRequest(ChatRequest):
    """Conversations of which the assistant's next message is wanted each, whole and without tools."""

    messages: Annotated[  # type: ignore[assignment]
        list[_Conversation], Field(min_length=1, max_length=MAX_CONVERSATIONS, fail_fast=True)
    ]
    n: Annotated[int, Field(ge=1, le=1), whole] | None = None
    stream: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    def conversation(self, number: int) -> ChatRequest:
        """Returns one of the conversations as a request of its own."""
        fields = {name: getattr(self, name) for name in ChatRequest.model_fields}
        return ChatRequest.model_construct(**{**fields, "messages": self.messages[number]})

    def check_combinations(self) -> None:
        """See CommonRequest."""
        differing = len(self.messages) if self.continue_final_message else 1
        for number in range(differing):
            self.conversation(number).check_combinations()

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from MessageRequest.unknown_fields(self)
        for first, conversation in enumerate(self.messages):
            for second, message in enumerate(conversation):
                yield from (f"messages[{first}][{second}].{name}" for name in message.unknown_fields())


class BatchChatDialect:
    """See Dialect. Every conversation is a prompt, made as a chat's."""

    kind = BatchChatRequest

    def __init__(self, chats: ChatDialect) -> None:
        self._chats = chats

    async def prompts(self, request: BatchChatRequest, max_tokens: int, tenant: str) -> list[Prompt]:
        """See Dialect."""
        prompts = []
        for number in range(len(request.messages)):
            chat = request.conversation(number)
            (prompt,) = await self._chats.prompts(chat, max_tokens, tenant)
            shown = self._chats.shown(chat, prompt)
            prompts.append(replace(prompt, echo="" if shown is None else shown.echo))
            await asyncio.sleep(0)  # other requests get their turn
        if self.constrains(request) and len(set(map(_begun, prompts))) > 1:
            words = "some of the answers go on reasoning, and others do not: they cannot have one form."
            raise invalid(f"Invalid 'messages': {words}", "messages", "invalid_value")
        return prompts

    def ignored_fields(self, request: BatchChatRequest) -> Iterator[str]:
        """See Dialect."""
        yield from request.unknown_fields()
        yield from self._chats.ignored_fields(request.conversation(0).model_copy(update={"messages": []}))

    def shown(self, request: BatchChatRequest, prompt: Prompt) -> PromptShown | None:
        """See Dialect."""
        if not prompt.echo and request.prompt_logprobs is None and not request.return_token_ids:
            return None
        return PromptShown(
            prompt.token_ids.tolist(),
            prompt.echo,
            prompt_logprobs=request.prompt_logprobs,
            shows_ids=bool(request.return_token_ids),
        )

    def constrains(self, request: BatchChatRequest) -> bool:
        """See Dialect."""
        return self._chats.constrains(request)

    def grammar(self, request: BatchChatRequest, prompt: Prompt) -> tuple[str, str]:
        """See Dialect."""
        return self._chats.grammar(request, prompt)


def _begun(prompt: Prompt) -> tuple[bool, bool] | None:
    """Returns the part of an answer that its prompt has, as far as a grammar depends on it."""
    return None if prompt.reading is None else (prompt.reading.start.reasoned, prompt.reading.start.reasons)
