"""A choice: one sequence as its client sees it, in text and finish reasons instead of tokens."""

from dataclasses import dataclass

from services.gateway.generation import Delta
from services.gateway.text.sequence_text import SequenceText
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Update:
    """What one delta adds.

    tokens, logprobs: of the tokens that count; parallel. logprobs None: not asked for.
    finish_reason: OpenAI's; None: it goes on.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None

    @property
    def worth_a_chunk(self) -> bool:
        """False: nothing that a client could see."""
        return bool(self.text) or self.finish_reason is not None or bool(self.logprobs)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice:
    """Turns deltas into updates. After an update with a finish reason there is none."""

    def __init__(self, text: SequenceText) -> None:
        self._text = text
        self.num_generated = 0
        self.cached_tokens = 0

    def take(self, delta: Delta) -> Update:
        """The token that ended the sequence counts and has logprobs, but is not text."""
        self.cached_tokens = delta.cached_tokens
        tokens = delta.tokens
        piece = self._text.feed(tokens[:-1] if delta.finish is FinishReason.STOP else tokens)
        text, finish_reason = piece.text, _FINISH_REASONS.get(delta.finish)
        if piece.stopped:
            tokens, finish_reason = tokens[: piece.num_tokens], "stop"
        elif finish_reason is not None:
            text += self._text.flush()
        self.num_generated += len(tokens)
        logprobs = None if delta.logprobs is None else delta.logprobs[: len(tokens)]
        return Update(text, tokens, logprobs, finish_reason)
