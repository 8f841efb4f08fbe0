"""Guided sequences: answers that match a grammar, because each token that could not go on in it is masked.

A grammar is text in the request, in one of llguidance's notations, and its state follows from the tokens that were
generated. So a sequence that is handed over, preempted or continued on another worker goes on in the same way.

    engine thread     plan ─ ask for masks ─ launch: the model runs ──────── masks ─ sample ─ collect
                                   │                                           ▲
    guidance thread                └─ compile, follow the tokens, fill a mask for each row ─┘

The library computes without the interpreter lock (https://github.com/guidance-ai/llguidance).
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import numpy as np
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

from services.engine.runner.base import TokenMasks

_MAX_COMPILED = 256  # grammars, each with what is known of its states so far
_WORD_BITS = 32  # of a mask


class GuidedSequence:
    """One sequence's place in its grammar. Only the guidance thread touches `matcher`.

    allowed: uint32[words], a bit for each token that it may ever choose; None: it may choose any.
    error: why the sequence cannot go on, once that is known; empty: it can.
    """

    def __init__(self, guidance: "Guidance", grammar: str, allowed: np.ndarray | None = None) -> None:
        self.guidance = guidance
        self.allowed = allowed
        self.grammar = grammar
        self.matcher: llguidance.LLMatcher | None = None
        self.num_followed = 0  # generated tokens that the matcher was given, or will be
        self.error = ""


@dataclass(slots=True, eq=False)
class GuidedRow:
    """A row that gets a token in the next step."""

    row: int
    sequence: GuidedSequence
    new_tokens: list[int]  # generated since the sequence's last row
    banned: np.ndarray  # int[n], tokens that it must not choose now, unless there is no other


class Guidance:
    """Computes the masks of one worker's guided sequences."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """tokenizer: a tokenizer.json; vocab_size: of the logits. Raises ValueError for one that is not read."""
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        if self._tokenizer.vocab_size != vocab_size:
            raise ValueError(f"the tokenizer has {self._tokenizer.vocab_size} tokens, the model {vocab_size}")
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._bits = np.zeros((0, self._num_words), dtype=np.int32)  # of the last masks
        self._workers = llguidance.LLExecutor()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guidance")
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()  # least recently used first

    def masks(self, rows: Sequence[GuidedRow]) -> TokenMasks:
        """Begins to compute which tokens each row may choose. The masks of the call before are no longer needed."""
        filled: Future[np.ndarray] = self._thread.submit(self._fill, rows)
        return TokenMasks(np.array([row.row for row in rows], dtype=np.int64), filled.result)

    def _fill(self, rows: Sequence[GuidedRow]) -> np.ndarray:
        """Returns a bit for each token that a row may choose, uint32[rows, words]; all bits for one with an error."""
        if len(rows) > len(self._bits):
            self._bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        bits = self._bits[: len(rows)]
        matchers = self._followed(rows)
        if sound := [(matcher, index) for index, matcher in enumerate(matchers) if not matcher.is_error()]:
            fill_next_token_bitmask_par(self._workers, sound, bits)
        masks = bits.view(np.uint32)
        for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if matcher.is_error():
                row.sequence.error = matcher.get_error()
                masks[index] = np.uint32(0xFFFFFFFF)
                continue
            allowed = row.sequence.allowed
            if allowed is not None and not _restrict(masks[index], allowed):
                row.sequence.error = "it goes on with none of the tokens that are allowed"
            if len(row.banned):
                _ban(masks[index], row.banned)
        return masks

    def _followed(self, rows: Sequence[GuidedRow]) -> list[llguidance.LLMatcher]:
        """Returns the rows' matchers, which know their new tokens. Rows with one new token are told in one call."""
        matchers: list[llguidance.LLMatcher] = []
        singles: list[tuple[llguidance.LLMatcher, int]] = []
        for row in rows:
            matcher, new_tokens = row.sequence.matcher, row.new_tokens
            if matcher is None:
                matcher = row.sequence.matcher = self._compile(row.sequence.grammar).deep_copy()
            matchers.append(matcher)
            if len(new_tokens) == 1:
                singles.append((matcher, new_tokens[0]))
            elif new_tokens:
                matcher.consume_tokens(new_tokens)
        if singles:
            consume_token_par(self._workers, singles)
        return matchers

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = llguidance.LLMatcher(
                self._tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
            )
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled


def _restrict(mask: np.ndarray, allowed: np.ndarray) -> bool:
    """Leaves a mask, uint32[words], only allowed tokens. False: there are none, and the mask is as it was."""
    both = mask & allowed
    if not both.any():
        return False
    mask[:] = both
    return True


def _ban(mask: np.ndarray, tokens: np.ndarray) -> None:
    """Takes tokens out of a mask, uint32[words], unless nothing is left then."""
    without = mask.copy()
    np.bitwise_and.at(without, tokens // _WORD_BITS, ~(np.uint32(1) << (tokens % _WORD_BITS).astype(np.uint32)))
    if without.any():
        mask[:] = without
