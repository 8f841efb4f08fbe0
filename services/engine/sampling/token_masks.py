"""Masks of tokens: a bit for each token of a vocabulary, as in TokenMasks, set where it may come."""

from collections.abc import Sequence

import numpy as np

WORD_BITS = 32  # of a mask
NONE_LEFT = "every token that is allowed is banned"  # why a sequence cannot go on


def num_words(vocab_size: int) -> int:
    """Returns the words of a mask."""
    return -(-vocab_size // WORD_BITS)


def mask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns a mask of these tokens, uint32[words], lowest bit first."""
    tokens, mask = np.array(token_ids, dtype=np.int64), np.zeros(num_words(vocab_size), dtype=np.uint32)
    np.bitwise_or.at(mask, tokens // WORD_BITS, _bits(tokens))
    return mask


def without(mask: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Returns a mask, uint32[words], without these tokens, int[n]."""
    left = mask.copy()
    np.bitwise_and.at(left, token_ids // WORD_BITS, ~_bits(token_ids))
    return left


def is_any_left(allowed: np.ndarray | None, banned: np.ndarray, vocab_size: int) -> bool:
    """True when a token that is allowed, by a mask or without one, is not among the banned ones, int[n]."""
    if allowed is None:
        return len(banned) < vocab_size or len(np.unique(banned)) < vocab_size
    return bool(without(allowed, banned).any())


def _bits(tokens: np.ndarray) -> np.ndarray:
    """Returns each token's bit in its word, uint32[n]."""
    bits: np.ndarray = np.uint32(1) << (tokens % WORD_BITS).astype(np.uint32)
    return bits
