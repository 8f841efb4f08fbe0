"""POST /v1/chat/completions/batch, vLLM's: several conversations in one request, and a choice for each."""

from collections.abc import Sequence

from services.gateway.api.answers.choice import Update, Usage
from services.gateway.api.dialects.chat_batch import BatchChatRequest
from services.gateway.openai.answer import AnswerHead
from services.gateway.openai.chat import ChatAnswer
from services.gateway.openai.neutral import CHAT_NEUTRAL
from services.gateway.text.tokenizer import Tokenizer


class BatchChatFormat:
    """See AnswerFormat."""

    neutral = CHAT_NEUTRAL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: BatchChatRequest, head: AnswerHead) -> "BatchChatAnswer":
        """See AnswerFormat."""
        return BatchChatAnswer(self._tokenizer, request, head)


class BatchChatAnswer(ChatAnswer):
    """See Answer. What is shown of a prompt is in its choice."""

    def body(self, choices: Sequence[Update], usage: Usage) -> bytes:
        """See Answer."""
        return self._body([self._choice(update) | self._of_prompt(update) for update in choices], usage, {})
