"""The dialect of chats, which makes prompts of messages by the model's chat template."""

import asyncio
from collections.abc import Iterator
from functools import partial

from services.gateway.api.answers.choice import PromptShown
from services.gateway.api.dialects.chat_answers import ChatAnswers, ChatModel
from services.gateway.api.dialects.chat_text import ChatTexts
from services.gateway.api.dialects.prompts import Prompt, check_text_length, tokens_of_text
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.side_thread import SideThread
from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import LONG_TEXT_CHARS, Tokenizer

_SHORT_MESSAGE = 1024  # characters of a message that the prompt has begun, which are read in less than a millisecond


class ChatDialect:
    """See Dialect. Refuses every request where the model has no template."""

    kind = ChatRequest

    def __init__(self, tokenizer: Tokenizer, model: ChatModel, side: SideThread, processes: SideProcesses) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._answers = ChatAnswers(model, tokenizer)
        self._texts = ChatTexts(model, self._answers, side, processes)

    async def prompts(self, request: ChatRequest, max_tokens: int, tenant: str) -> list[Prompt]:
        """See Dialect. The template writes the BOS itself, so tokenizing adds no second one unless asked to."""
        text = await self._texts.render(request, tenant)
        limits = request.text_limits(max_tokens)
        if limits.kept is None:
            check_text_length(self._tokenizer, text, max_tokens, request.prompt_param)
        special = bool(request.add_special_tokens)
        encode = partial(
            tokens_of_text,
            self._tokenizer,
            text,
            limits,
            add_special_tokens=special,
            with_offsets=request.wants_token_offsets,
        )
        made = await asyncio.to_thread(encode) if len(text) > LONG_TEXT_CHARS else encode()
        has_end = not (made.num_cut and limits.from_right)
        goes_on = has_end and (request.continue_final_message or request.add_generation_prompt is not False)
        begun = self._answers.begun(text) if goes_on else ""
        reading = await self._side.run_if(len(begun) > _SHORT_MESSAGE, self._answers.reading, request, begun)
        return [Prompt(made.token_ids, reading=reading, num_cut=made.num_cut, token_offsets=made.offsets)]

    def ignored_fields(self, request: ChatRequest) -> Iterator[str]:
        """See Dialect."""
        yield from request.unknown_fields()
        yield from self._texts.ignored_fields(request)

    def shown(self, request: ChatRequest, prompt: Prompt) -> PromptShown | None:
        """See Dialect. An echo is the last message, where that is the assistant's: the answer goes on from it."""
        last = request.messages[-1]
        echo = last.text if request.echo and last.role == "assistant" else ""
        if not echo and request.prompt_logprobs is None and not request.return_token_ids:
            return None
        return PromptShown(
            prompt.token_ids.tolist(),
            echo,
            prompt_logprobs=request.prompt_logprobs,
            shows_ids=bool(request.return_token_ids),
        )

    def constrains(self, request: ChatRequest) -> bool:
        """See Dialect."""
        return self._answers.constrains(request)

    def grammar(self, request: ChatRequest, prompt: Prompt) -> tuple[str, str]:
        """See Dialect."""
        return self._answers.grammar(request, prompt.reading)
