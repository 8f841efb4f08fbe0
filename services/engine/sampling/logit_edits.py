"""Changes that a request makes to logits: bias, bad words, penalties for repetition, masks.

Only sequences whose request asks for such changes have an entry here, so a batch without any costs one look at a mask.
All of this is derived from the request and the sequence's tokens, so a sequence that continues on another worker
continues in the same way.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np

from services.engine.runner.base import LogitEdits, TokenMasks
from services.engine.sampling.grammars import Grammar
from services.engine.sampling.guidance import Guidance, GuidedSequence
from services.engine.sampling.token_masks import is_any_left, mask_of
from services.protocol.sampling import BAN, SamplingParams

_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_VALUES = np.zeros(0, dtype=np.float32)


def edits_of(
    sampling: SamplingParams,
    num_prompt: int,
    guidance: Guidance | None = None,
    grammar: Grammar | None = None,
    vocab_size: int = 0,
) -> "SequenceEdits | None":
    """Returns the edits of a sequence with these parameters; None: it has none.

    guidance: computes masks; without it there must be no grammar. grammar: the compiled one of `sampling`, if it has
    one. vocab_size: of the logits.
    """
    masked = sampling.grammar or sampling.allowed_token_ids
    if not (sampling.logit_bias or sampling.bad_words or sampling.counts_tokens or masked):
        return None
    allowed = mask_of(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None
    if not sampling.grammar:
        return SequenceEdits(sampling, num_prompt, allowed=allowed)
    assert guidance is not None
    assert grammar is not None
    return SequenceEdits(sampling, num_prompt, GuidedSequence(guidance, grammar, allowed))


class SequenceEdits:
    """The edits of one sequence. `tokens` is always all of its tokens so far, prompt first, as int32[n].

    allowed: a bit for each token that it may ever choose, as in TokenMasks; None: it may choose any, or those that its
    grammar's masks have.
    biases: int64[B] token ids, and float32[B], what is added to their logits.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        num_prompt: int,
        guided: GuidedSequence | None = None,
        allowed: np.ndarray | None = None,
    ) -> None:
        self.guided = guided
        self.allowed = allowed
        self.penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._num_prompt = num_prompt
        kept = [(token, value) for token, value in sampling.logit_bias if value > BAN]
        self.biases = (
            np.array([token for token, _ in kept], dtype=np.int64),
            np.array([value for _, value in kept], dtype=np.float32),
        )
        self._banned = np.array(sorted(sampling.banned_token_ids), dtype=np.int64)
        self._bad_words = [word for word in sampling.bad_words if len(word) > 1]
        self._longest = max((len(word) for word in self._bad_words), default=0)
        self._counts_tokens = sampling.counts_tokens
        self._counts: TokenCounts | None = None  # created when the sequence is first seen
        self._leaves_any: bool | None = None  # None: nobody has looked
        self.names_tokens = self._counts_tokens or bool(sampling.bad_words or sampling.logit_bias)
        # False: the edits never change.
        self.follows_tokens = self._counts_tokens or bool(self._bad_words) or guided is not None

    def banned(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens that must not come next, int64[n]: what is never to come, and ends of bad words."""
        if not self._bad_words:
            return self._banned
        generated = tokens[max(self._num_prompt, len(tokens) - self._longest) :].tolist()
        ends = [word[-1] for word in self._bad_words if _ends_with(generated, word[:-1])]
        return np.concatenate([self._banned, np.array(ends, dtype=np.int64)])

    def leaves_any(self, banned: np.ndarray, vocab_size: int) -> bool:
        """True when a token is left that may come next. banned: int[n], all that must not.

        Without bad words ever fewer tokens are banned, so the answer of the sequence's first row holds.
        """
        if self._leaves_any is None or self._bad_words:
            self._leaves_any = is_any_left(self.allowed, banned, vocab_size)
        return self._leaves_any

    def apart(self) -> "SequenceEdits":
        """Returns the same edits for tokens of which some may not stay: their counts are not kept."""
        edits = copy(self)
        edits._counts = None
        return edits

    def counts(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence's distinct tokens, int64[C], and how often each was generated, float32[C]."""
        if not self._counts_tokens:
            return _NO_IDS, _NO_VALUES
        if self._counts is None:
            self._counts = TokenCounts(tokens, self._num_prompt)
        return self._counts.up_to(tokens)


class TokenCounts:
    """Counts of each token in a growing sequence. A new token costs the same however long the sequence is."""

    def __init__(self, tokens: np.ndarray, num_prompt: int) -> None:
        distinct, places = np.unique(tokens, return_inverse=True)
        self._index = {token: place for place, token in enumerate(distinct.tolist())}
        self._tokens = distinct.astype(np.int64)
        self._counts = np.bincount(places[num_prompt:], minlength=len(distinct)).astype(np.float32)
        self._counted = len(tokens)

    def up_to(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct tokens, and their counts beyond the prompt; views that the next call changes."""
        for token in tokens[self._counted :].tolist():
            self._add(token)
        self._counted = len(tokens)
        return self._tokens[: len(self._index)], self._counts[: len(self._index)]

    def _add(self, token: int) -> None:
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1


def gather_edits(
    rows: Sequence[tuple[int, SequenceEdits | None, np.ndarray, np.ndarray]],
    num_rows: int,
    masks: TokenMasks | None = None,
    stuck: tuple[int, ...] = (),
) -> LogitEdits:
    """Gathers one step's edits for `num_rows` rows. stuck: those that may choose no token.

    `rows` has an entry for each row with any beside its mask: its number, its edits, its tokens so far, and token ids
    that it must not choose now.
    """
    allowed: list[tuple[int, np.ndarray]] = []
    bias: list[tuple[int, np.ndarray, np.ndarray]] = []
    counts: list[tuple[int, np.ndarray, np.ndarray]] = []
    penalties = np.tile(np.array([[1.0], [0.0], [0.0]], dtype=np.float32), num_rows)
    for row, edits, tokens, banned in rows:
        if len(banned):
            bias.append((row, banned.astype(np.int64), np.full(len(banned), -np.inf, dtype=np.float32)))
        if edits is not None and edits.allowed is not None:
            allowed.append((row, edits.allowed))
        if edits is not None and edits.names_tokens:
            bias.append((row, *edits.biases))
            counts.append((row, *edits.counts(tokens)))
            penalties[:, row] = edits.penalties
    if allowed:
        masks = _with_allowed(masks, allowed)
    repetition, frequency, presence = penalties
    return LogitEdits(*_packed(bias), *_packed(counts), repetition, frequency, presence, masks, stuck)


def _with_allowed(masks: TokenMasks | None, allowed: Sequence[tuple[int, np.ndarray]]) -> TokenMasks:
    """Puts rows whose masks never change after those that are computed."""
    rows = np.array([row for row, _ in allowed], dtype=np.int64)
    own = np.stack([mask for _, mask in allowed])
    if masks is None:
        return TokenMasks(rows, lambda: own)
    computed = masks.bits
    return TokenMasks(np.concatenate([masks.rows, rows]), lambda: np.concatenate([computed(), own]), masks.begin)


def _packed(parts: list[tuple[int, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows, token ids and values, one entry after the other."""
    rows = np.repeat(np.array([row for row, _, _ in parts], dtype=np.int64), [len(ids) for _, ids, _ in parts])
    return rows, np.concatenate([_NO_IDS, *(p[1] for p in parts)]), np.concatenate([_NO_VALUES, *(p[2] for p in parts)])


def _ends_with(tokens: list[int], tail: tuple[int, ...]) -> bool:
    return len(tail) == 0 or tuple(tokens[-len(tail) :]) == tail
