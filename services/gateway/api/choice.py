"""A choice: one sequence as its client sees it, in text and finish reasons instead of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.api.generation import Delta
from services.gateway.text.sequence_text import SequenceText
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Update(NamedTuple):
    """What one delta adds.

    tokens, logprobs: of the tokens that count; parallel. logprobs None: not asked for. An entry that is None: of a
    prompt's first token, which follows nothing.
    finish_reason: OpenAI's; None: it goes on.
    prompt_logprobs: of the prompt's tokens from the second on, with the first update where they were asked for.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finish_reason: str | None
    prompt_logprobs: list[tuple[int, TokenLogprobs]] | None = None

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


@dataclass(frozen=True, slots=True)
class PromptShown:
    """What an answer repeats of its prompt: its text and, with logprobs, its tokens; and its logprobs by themselves."""

    token_ids: list[int]
    echo: str = ""
    echo_logprobs: int | None = None  # alternatives, of echoed tokens
    prompt_logprobs: int | None = None  # alternatives; None: not asked for


class Choice:
    """Turns the deltas of one choice into updates. After an update with a finish reason there is none."""

    def __init__(self, index: int, text: SequenceText, prompt: PromptShown | None = None) -> None:
        """prompt: what is shown of it in the first update; None: nothing."""
        self._index = index
        self._text = text
        self._prompt = prompt
        self.num_generated = 0

    @property
    def extend(self) -> Callable[[int], str] | None:
        """After the first update: turns a token with nothing beside it into text. None: `take` has to."""
        return self._text.extend

    def take(self, delta: Delta) -> Update:
        """The token that ended the sequence counts and has logprobs, but is not text."""
        tokens = delta.tokens
        piece = self._text.feed(tokens[:-1] if delta.finish is FinishReason.STOP else tokens)
        text, finish_reason = piece.text, _FINISH_REASONS.get(delta.finish)
        if piece.stopped:
            tokens, finish_reason = tokens[: piece.num_tokens], "stop"
        elif finish_reason is not None:
            text += self._text.flush()
        self.num_generated += len(tokens)
        logprobs: list[TokenLogprobs | None] | None = None
        if delta.logprobs is not None:
            logprobs = [*delta.logprobs[: len(tokens)]]
        update = Update(self._index, text, tokens, logprobs, finish_reason)
        prompt, self._prompt = self._prompt, None
        return update if prompt is None else _after_prompt(prompt, delta.prompt_logprobs or [], update)


def _after_prompt(prompt: PromptShown, logprobs: list[TokenLogprobs], update: Update) -> Update:
    """A first update, with what is shown of the prompt before it."""
    tokens, echoed = update.tokens, update.logprobs
    if prompt.echo_logprobs is not None and echoed is not None:
        tokens = prompt.token_ids + tokens
        echoed = [None, *_narrowed(logprobs, prompt.echo_logprobs), *echoed]
    shown = None
    if prompt.prompt_logprobs is not None:
        shown = list(zip(prompt.token_ids[1:], _narrowed(logprobs, prompt.prompt_logprobs), strict=True))
    return Update(update.choice, prompt.echo + update.text, tokens, echoed, update.finish_reason, shown)


def _narrowed(logprobs: list[TokenLogprobs], width: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(entry.sampled, entry.top[:width]) for entry in logprobs]
