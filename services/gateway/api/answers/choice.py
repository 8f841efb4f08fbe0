"""A choice as its client sees it: text and finish reasons instead of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.gateway.api.generation import Delta
from services.gateway.text.sequence_text import SequenceText
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ToolCallPart(NamedTuple):
    """The next part of a call of a tool.

    call: its number in the message, from 0.
    id, name: of the call, in its first part; None in later ones.
    arguments: the next piece of their JSON; the pieces of all parts joined are the whole.
    custom: the tool is a custom one, and `arguments` are pieces of its input, which is text.
    """

    call: int
    id: str | None
    name: str | None
    arguments: str
    custom: bool = False


class Update(NamedTuple):
    """The part of an answer that one delta adds.

    text: the content; where the model's reasoning and calls of tools are told apart, without them.
    tokens: without those after the end of a stop string.
    logprobs: one entry for each of `tokens`; None: not asked for. The entry of a prompt's first token is None, since
    that token follows nothing.
    finish_reason: OpenAI's; None: the choice goes on.
    prompt_logprobs: the prompt's tokens from the second on, with their logprobs, in the first update where they were
    asked for.
    reasoning: the part of the text that is the model's reasoning, without the marks around it.
    stop_reason: the stop string, or the token of `stop_token_ids`, that ended the choice; None: nothing of that kind.
    prompt_token_ids: the prompt, in the first update where it was asked for.
    echoed: the prompt's tokens that `tokens` begins with, by their lengths in the text, in characters.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finish_reason: str | None
    prompt_logprobs: list[tuple[int, TokenLogprobs]] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    echoed: tuple[int, ...] = ()

    @property
    def generated(self) -> list[int]:
        """The tokens without those of the prompt."""
        return self.tokens[len(self.echoed) :] if self.echoed else self.tokens

    @property
    def worth_a_chunk(self) -> bool:
        """True when a client could see the update."""
        shown = self.text or self.reasoning or self.tool_calls or self.logprobs
        return bool(shown) or self.finish_reason is not None


def joined(parts: Sequence[Update]) -> Update:
    """Joins updates of one choice that follow each other to one, which has one part of each of their calls."""
    first, last = parts[0], parts[-1]
    return Update(
        first.choice,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.tokens],
        None if first.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
        last.finish_reason,
        first.prompt_logprobs,
        "".join(part.reasoning for part in parts),
        _joined_calls([call for part in parts for call in part.tool_calls]),
        last.stop_reason,
        first.prompt_token_ids,
        first.echoed,
    )


def _joined_calls(parts: Sequence[ToolCallPart]) -> tuple[ToolCallPart, ...]:
    calls: dict[int, ToolCallPart] = {}
    for part in parts:
        begun = calls.get(part.call)
        calls[part.call] = part if begun is None else begun._replace(arguments=begun.arguments + part.arguments)
    return tuple(calls.values())


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # None: the model's reasoning is not told apart

    def as_json(self) -> dict[str, object]:
        """The usage in OpenAI's form."""
        reasoning = self.reasoning_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}),
        }


@dataclass(frozen=True, slots=True)
class PromptShown:
    """The parts of a prompt that its answers show: its text, its tokens with logprobs, or logprobs by themselves."""

    token_ids: list[int]
    echo: str = ""  # the text
    echo_lengths: tuple[int, ...] = ()  # of each token in `echo`, in characters; where tokens are echoed
    echo_logprobs: int | None = None  # alternatives for each echoed token; None: tokens are not echoed
    prompt_logprobs: int | None = None  # alternatives for each token; None: not asked for
    shows_ids: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """The parts of a choice's end that are shown. stop_token_ids: those that a stop reason names, which EOS is not."""

    stop_token_ids: frozenset[int] = frozenset()
    shows_stop: bool = False  # the text ends with the stop string or stop token, not before it
    only_prompt: bool = False  # nothing that is generated is shown


_PLAIN_ENDING = Ending()


class Choice:
    """Turns the deltas of one choice into updates. An update with a finish reason is the last one."""

    def __init__(
        self, index: int, text: SequenceText, prompt: PromptShown | None = None, ending: Ending = _PLAIN_ENDING
    ) -> None:
        """prompt: shown in the first update; None: nothing is."""
        self._index = index
        self._ending = ending
        self._text = text
        self._prompt = prompt
        self.num_generated = 0
        self.num_reasoning: int | None = None  # tokens of reasoning; None: it is not told apart

    @property
    def extend(self) -> Callable[[int], str | None] | None:
        """Turns a plain token after the first update into text; None: tokens have to go through `take`.

        It may return None, for a token that has to.
        """
        return self._text.extend

    @property
    def extend_part(self) -> Callable[[int], Update | None] | None:
        """Turns a plain token that `extend` does not take into an update without a finish reason; None: no token.

        It may return None too, for a token that has to go through `take`.
        """
        return None

    def take(self, delta: Delta) -> Update:
        """Turns a delta into an update."""
        update = self._generated(delta)
        prompt, self._prompt = self._prompt, None
        return update if prompt is None else _after_prompt(prompt, delta.prompt_logprobs or [], update)

    def _generated(self, delta: Delta) -> Update:
        """Turns a delta into an update without the parts of the prompt.

        The token that ended the sequence counts and has logprobs, but is text only where `Ending` says so.
        """
        if self._ending.only_prompt:
            delta = _without_tokens(delta)
        tokens, stopped = delta.tokens, delta.finish is FinishReason.STOP
        piece = self._text.feed(tokens[:-1] if stopped and not self._ending.shows_stop else tokens)
        text, finish_reason = piece.text, _FINISH_REASONS.get(delta.finish)
        stop_reason: int | str | None = self._stop_token(delta)
        if piece.stopped is not None:
            tokens, finish_reason, stop_reason = tokens[: piece.num_tokens], "stop", piece.stopped
        elif finish_reason is not None:
            text += self._text.flush()
        self.num_generated += len(tokens)
        logprobs: list[TokenLogprobs | None] | None = None
        if delta.logprobs is not None:
            logprobs = [*delta.logprobs[: len(tokens)]]
        return Update(self._index, text, tokens, logprobs, finish_reason, stop_reason=stop_reason)

    def _stop_token(self, delta: Delta) -> int | None:
        if delta.finish is not FinishReason.STOP or not self._ending.stop_token_ids or not delta.tokens:
            return None
        return delta.tokens[-1] if delta.tokens[-1] in self._ending.stop_token_ids else None


def _without_tokens(delta: Delta) -> Delta:
    """Takes the one token out of the delta of a request for none."""
    return replace(delta, tokens=[], logprobs=None if delta.logprobs is None else [], finish=FinishReason.LENGTH)


def _after_prompt(prompt: PromptShown, logprobs: list[TokenLogprobs], update: Update) -> Update:
    """Puts the shown parts of the prompt before a first update."""
    tokens, echoed = update.tokens, update.logprobs
    lengths: tuple[int, ...] = ()
    if prompt.echo_logprobs is not None and echoed is not None:
        tokens, lengths = prompt.token_ids + tokens, prompt.echo_lengths
        echoed = [None, *_narrowed(logprobs, prompt.echo_logprobs), *echoed]
    shown = None
    if prompt.prompt_logprobs is not None:
        shown = list(zip(prompt.token_ids[1:], _narrowed(logprobs, prompt.prompt_logprobs), strict=True))
    return update._replace(
        text=prompt.echo + update.text,
        tokens=tokens,
        logprobs=echoed,
        prompt_logprobs=shown,
        prompt_token_ids=prompt.token_ids if prompt.shows_ids else None,
        echoed=lengths,
    )


def _narrowed(logprobs: list[TokenLogprobs], width: int) -> list[TokenLogprobs]:
    if not logprobs or len(logprobs[0].top) <= width:  # nothing else asked for more
        return logprobs
    return [TokenLogprobs(entry.sampled, entry.top[:width], entry.rank) for entry in logprobs]
