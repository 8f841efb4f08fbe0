"""Guided sequences: answers that match a grammar, because each token that could not go on in it is masked.

A grammar is text in the request, in one of llguidance's notations, and its state follows from the tokens that were
generated. So a sequence that is handed over, preempted or continued on another worker goes on in the same way.

    engine thread     plan ─ ask for masks ─ launch: the model runs ──────── masks ─ sample ─ collect
                                   │                                           ▲
    guidance thread                └─ follow the tokens, fill a mask for each row ─┘

Compiling a grammar may take as long as gateways let it take, a second, and no step waits for that: `Grammars` compiles
it while its request waits to be admitted, and others pass it. What a mask takes is bounded by the library: some 0.1 s.

On a CPU the model needs all cores, so masks beside it make its step longer. Where all rows of a step are greedy, the
engine thread asks after the model whether the likeliest token may come, which takes a small part of the time of a mask.
Only a row for which it must not gets one. The tokens are the same: the likeliest token, if it may come, is also the
likeliest of those that may.

    engine thread     plan ─ launch: the model runs ─ likeliest tokens ─ settle ─ masks of refused rows ─ collect

The library computes without the interpreter lock (https://github.com/guidance-ai/llguidance).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import numpy as np
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from services.engine.runner.base import TokenMasks
from services.engine.sampling.grammars import Grammar, Grammars
from services.engine.sampling.token_masks import NONE_LEFT, num_words, without


class GuidedSequence:
    """One sequence's place in its grammar. The guidance thread touches `matcher`, or the engine's while that one rests.

    allowed: uint32[words], a bit for each token that it may ever choose; None: it may choose any.
    error: why the sequence cannot go on, once that is known; empty: it can.
    """

    def __init__(self, guidance: "Guidance", grammar: Grammar, allowed: np.ndarray | None = None) -> None:
        self.guidance = guidance
        self.allowed = allowed
        self.grammar = grammar
        self.matcher: llguidance.LLMatcher | None = None
        self.num_followed = 0  # generated tokens that the matcher was given, or will be
        self.error = ""

    def started(self) -> llguidance.LLMatcher:
        """Returns the matcher, which is there once the sequence's first row was followed."""
        assert self.matcher is not None
        return self.matcher


@dataclass(slots=True, eq=False)
class GuidedRow:
    """A token of the next step: the first one of its sequence's row, or one that comes after a draft."""

    row: int
    sequence: GuidedSequence
    new_tokens: list[int]  # generated since the sequence's last row
    banned: np.ndarray  # int[n], tokens that it must not choose now, unless there is no other
    never: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # int[n], must not in any case
    draft: int | None = None  # the token that it comes after, if that is a draft: those of a sequence follow each other
    barred: bool = False  # its token does not hold, whatever it is


class Guidance:
    """Computes the masks of one worker's guided sequences. `grammars` are what they match."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """tokenizer: a tokenizer.json; vocab_size: of the logits. Raises ValueError for one that is not read."""
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        if self._tokenizer.vocab_size != vocab_size:
            raise ValueError(f"the tokenizer has {self._tokenizer.vocab_size} tokens, the model {vocab_size}")
        self._num_words = num_words(vocab_size)
        self._bits = np.zeros((0, self._num_words), dtype=np.int32)  # of the last masks
        self._workers = llguidance.LLExecutor()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guidance")
        self.grammars = Grammars(self._compile)

    def ready(self, grammar: Grammar) -> bool:
        """True once a grammar is done. Waits for it where nobody would be told of its end."""
        if self.grammars.on_compiled is None:
            grammar.wait()
        return grammar.done

    def masks(self, rows: Sequence[GuidedRow]) -> TokenMasks:
        """Returns the masks of the rows, not begun. Those of the call before are no longer needed."""
        step = _StepMasks(self._thread, rows, self._fill)
        if any(row.sequence.matcher is None or row.new_tokens for row in rows):
            step.follow(self._follow)
        return TokenMasks(_numbers(rows), step.bits, step.begin, step.settle)

    def _fill(self, rows: Sequence[GuidedRow]) -> np.ndarray:
        """Returns a bit for each token that a row may choose, uint32[rows, words]; all bits for one with an error."""
        if len(rows) > len(self._bits):
            self._bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        bits = self._bits[: len(rows)]
        matchers = [row.sequence.started() for row in rows]
        firsts = [index for index, row in enumerate(rows) if row.draft is None]
        if sound := [(matchers[index], index) for index in firsts if not matchers[index].is_error()]:
            fill_next_token_bitmask_par(self._workers, sound, bits)
        if len(firsts) < len(rows):
            self._fill_after_drafts(rows, bits)
        masks = bits.view(np.uint32)
        for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if row.barred or matcher.is_error():
                if not row.barred:
                    row.sequence.error = f"its grammar: {matcher.get_error()}"
                masks[index] = np.uint32(0xFFFFFFFF)
                continue
            if row.sequence.allowed is not None:
                masks[index] &= row.sequence.allowed
            if len(row.never):
                masks[index] = without(masks[index], row.never)
            if not masks[index].any():
                if row.draft is None:
                    row.sequence.error = NONE_LEFT
                else:
                    row.barred, masks[index] = True, np.uint32(0xFFFFFFFF)
            elif len(row.banned) and (left := without(masks[index], row.banned)).any():
                masks[index] = left
        return masks

    def _fill_after_drafts(self, rows: Sequence[GuidedRow], bits: np.ndarray) -> None:
        """Fills the masks of tokens after drafts. A matcher takes its drafts for that, and gives them back."""
        taken = 0
        for index, row in enumerate(rows):
            matcher = row.sequence.started()
            if row.draft is None:
                taken = 0
            elif rows[index - 1].barred or matcher.is_error() or matcher.try_consume_tokens([row.draft]) != 1:
                row.barred = True
            else:
                taken += 1
                fill_next_token_bitmask(matcher, bits, index)
            is_end = index + 1 == len(rows) or rows[index + 1].draft is None
            if is_end and taken:
                matcher.rollback(taken)

    def _follow(self, rows: Sequence[GuidedRow]) -> None:
        """Tells the rows' matchers their new tokens: those of rows with one new token in one call."""
        singles: list[tuple[llguidance.LLMatcher, int]] = []
        for row in rows:
            matcher, new_tokens = row.sequence.matcher, row.new_tokens
            if row.draft is not None:
                continue
            if matcher is None:
                matcher = row.sequence.matcher = row.sequence.grammar.matcher()
            if len(new_tokens) == 1:
                singles.append((matcher, new_tokens[0]))
            elif new_tokens:
                matcher.consume_tokens(new_tokens)
        if singles:
            consume_token_par(self._workers, singles)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # makes most of what is made only when it is needed
        return matcher


class _StepMasks:
    """The masks of one step's guided rows. `fill` computes masks of some rows, on the guidance thread or another."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        rows: Sequence[GuidedRow],
        fill: Callable[[Sequence[GuidedRow]], np.ndarray],
    ) -> None:
        self._thread = thread
        self._rows = rows
        self._fill = fill
        self._followed: Future[None] | None = None
        self._filled: Future[np.ndarray] | None = None

    def follow(self, follow: Callable[[Sequence[GuidedRow]], None]) -> None:
        """Begins to tell the rows' matchers their new tokens, on the guidance thread."""
        self._followed = self._thread.submit(follow, self._rows)

    def begin(self) -> None:
        """Starts the computation of all masks on the guidance thread."""
        self._filled = self._thread.submit(self._fill, self._rows)

    def bits(self) -> np.ndarray:
        """Waits for all masks, and returns them."""
        if self._filled is None:
            self.begin()
        assert self._filled is not None
        self._wait()
        return self._filled.result()

    def settle(self, tokens: np.ndarray) -> TokenMasks | None:
        """Puts forced tokens in the place of likeliest ones, and returns masks for the rows whose token is refused.

        The matchers of the other rows follow their tokens at once. `TokenMasks` says the rest.
        """
        self._wait()
        refused: list[GuidedRow] = []
        before: int | None = None  # the token that was settled last
        for index, (row, likeliest) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            row.barred = row.draft is not None and row.draft != before
            token = before = None if row.barred else _settled(row, likeliest)
            if token is not None:
                tokens[index] = token
                row.sequence.num_followed += 1
            elif row.draft is None:
                refused.append(row)
            else:
                row.barred = True
        return TokenMasks(_numbers(refused), lambda: self._fill(refused)) if refused else None

    def _wait(self) -> None:
        """Waits until the matchers know all tokens. Raises what failed there."""
        if self._followed is not None:
            self._followed.result()


def _settled(row: GuidedRow, likeliest: int) -> int | None:
    """Returns the token that a row gets, which its matcher then has followed; None: only a mask can say.

    The matcher takes any token that begins a text which the grammar forces; a mask leaves one alone, by which the
    tokenizer would write that text. So that both ways give the same token, forced tokens are looked at first.
    """
    if row.sequence.allowed is not None or len(row.banned) or len(row.never):
        return None
    matcher = row.sequence.started()
    forced = matcher.compute_ff_tokens()
    token = forced[0] if forced else likeliest
    return token if matcher.try_consume_tokens([token]) == 1 else None


def _numbers(rows: Sequence[GuidedRow]) -> np.ndarray:
    return np.array([row.row for row in rows], dtype=np.int64)
