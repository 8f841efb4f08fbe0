"""A ledger entry: one choice in flight, the tokens delivered for it, and those that its reader has not taken.

Most rows of a frame are one token with nothing beside it: `deliver_if_plain` has the shortest way for these, from the
row to the client's stream. All others go through `Ledger.on_rows`.
"""

from array import array
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from services.gateway.api.generation import Delta, GenerationError, GenerationRequest, TakeToken, never
from services.gateway.dispatch.ledger.attempt import Attempt
from services.gateway.dispatch.retries import PROGRESS, Retries
from services.protocol.capsule import Capsule
from services.protocol.frames import Row, TokenLogprobs
from services.protocol.outcomes import FinishReason


class EntryListener(Protocol):
    """Is told when an entry has something for its reader. No method may wait."""

    def on_news(self, entry: "LedgerEntry") -> None:
        """Tokens wait to be taken, the attempt ended, or the choice did."""

    def on_error(self, error: Exception) -> None:
        """The entry's `take_token` raised this error."""


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """A choice in flight."""

    request: GenerationRequest
    choice: int
    deadline: float  # on the ledger's clock
    listener: EntryListener
    take_token: TakeToken = never  # set by the reader while it relays tokens
    start: int = field(init=False)  # length of the choice's first capsule
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)  # of the sequence, where `max_tokens` is reached
    length: int = field(init=False)  # of the sequence so far: the position of its next token
    wants_logprobs: bool = field(init=False)  # a token counts as delivered only together with its logprobs
    only_tokens: bool = field(init=False)  # no logprobs are wanted, of the prompt neither, nor an embedding
    embeds: bool = field(init=False)  # an embedding is wanted, and no token
    embedding: np.ndarray | None = field(default=None, init=False)  # float32[size]; None: not wanted, or not there
    generated: "array[int]" = field(default_factory=lambda: array("i"))  # delivered tokens
    untaken: list[int] = field(default_factory=list)  # the last ones of `generated`
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `untaken`
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False)  # None: not wanted, or taken
    attempt: Attempt | None = None
    retries: Retries = field(default_factory=Retries)
    cached_tokens: int | None = None
    finish: FinishReason = FinishReason.NONE
    closed: bool = False
    _error: GenerationError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        capsule = self.request.capsules[self.choice]
        self.start = self.length = len(capsule.token_ids)
        self.num_prompt = capsule.num_prompt
        self.max_len = capsule.max_len
        self.wants_logprobs = capsule.sampling.num_logprobs is not None
        self.prompt_logprobs = None if capsule.sampling.num_prompt_logprobs is None else []
        self.embeds = capsule.pooling is not None
        self.only_tokens = not self.wants_logprobs and self.prompt_logprobs is None and not self.embeds

    def capsule(self) -> Capsule:
        """The capsule that the next attempt starts from."""
        start = self.request.capsules[self.choice]
        sampling, token_ids = start.sampling, start.token_ids
        if sampling.num_prompt_logprobs is not None and not self.lacks_prompt:
            sampling = replace(sampling, num_prompt_logprobs=None)
        if self.generated:
            token_ids = np.concatenate([token_ids, np.frombuffer(self.generated.tobytes(), np.int32)])
        return replace(start, token_ids=token_ids, sampling=sampling)

    @property
    def lacks_prompt(self) -> bool:
        """True while logprobs of the prompt are wanted and incomplete; until then no token counts as delivered."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def has_progress(self) -> bool:
        """True when the attempt has brought tokens enough to show that its workers can compute the choice."""
        return self.attempt is not None and self.length >= self.attempt.start + PROGRESS

    def note_uncomputed(self, tokens: int) -> None:
        """Notes that an attempt found so many leading tokens in a cache, and computed those after them.

        What one attempt computed, the next may find: a token counts as cached where no attempt computed it.
        """
        known = self.num_prompt if self.cached_tokens is None else self.cached_tokens
        self.cached_tokens = min(known, tokens)

    def wake(self) -> None:
        """Tells the reader that there is news."""
        self.listener.on_news(self)

    def deliver_if_plain(self, row: Row) -> bool:
        """Delivers a plain row: the next tokens and nothing else, which do not end the sequence.

        Returns False for any other row, of which nothing is delivered.
        """
        _, position, tokens, finish, cached, _ = row
        plain = position == self.length < self.max_len - len(tokens) and cached < 0 and self.only_tokens
        if not plain or finish or not tokens:
            return False
        if len(tokens) == 1 and not self.untaken:
            try:
                if self.take_token(tokens[0]):
                    self.generated.append(tokens[0])
                    self.length += 1
                    return True
            except Exception as error:  # the reader's task raises it; here it would end the worker's stream
                self.listener.on_error(error)
        self._append(tokens)
        self.listener.on_news(self)
        return True

    def deliver(self, row: Row) -> bool:
        """Delivers the tokens of a row that are new, up to `max_len`. Returns whether there were any.

        A row that begins beyond the next token delivers nothing, nor does one without the logprobs that are wanted.
        """
        length = self.length
        skip = length - row.position
        if skip < 0 or (self.wants_logprobs and row.logprobs is None):
            return False
        stop = skip + self.max_len - length
        tokens = row.tokens[skip:stop]
        self._append(tokens)
        if self.wants_logprobs and row.logprobs is not None:
            self.logprobs.extend(row.logprobs[skip:stop])
        return bool(tokens)

    def _append(self, tokens: list[int]) -> None:
        self.generated.extend(tokens)
        self.untaken.extend(tokens)
        self.length += len(tokens)

    def deliver_prompt(self, row: Row) -> None:
        """Delivers the prompt's logprobs in a row that are wanted and new."""
        if self.prompt_logprobs is not None and row.logprobs is not None:
            skip = len(self.prompt_logprobs) + 1 - row.position
            if skip >= 0:
                self.prompt_logprobs += row.logprobs[skip : self.num_prompt - row.position]
                if not self.lacks_prompt:
                    self.wake()

    def take(self) -> Delta | None:
        """Returns all that was delivered since the last call; None: nothing was."""
        if not self.only_tokens and self.lacks_prompt:
            return None
        tokens, self.untaken = self.untaken, []
        if not tokens and self.finish is FinishReason.NONE:
            return None
        cached = self.cached_tokens or 0
        if self.only_tokens:
            return Delta(tokens, None, self.finish, cached, self.choice)
        logprobs, self.logprobs = self.logprobs, []
        prompt, self.prompt_logprobs = self.prompt_logprobs, None
        wanted = logprobs if self.wants_logprobs else None
        return Delta(tokens, wanted, self.finish, cached, self.choice, prompt, self.embedding)

    def close(self, error: GenerationError | None) -> None:
        """Ends the choice. `error` says why its answer is incomplete; None: it is complete, or no longer wanted."""
        self.closed = True
        self._error = error

    def error(self) -> GenerationError | None:
        """The error that the choice was closed with; None: it is in flight, complete, or no longer wanted."""
        return self._error

    def check(self) -> None:
        """Raises the GenerationError that the choice was closed with, if there is one."""
        if self._error is not None:
            raise self._error
