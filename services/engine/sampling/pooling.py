"""Pooling: the hidden states of a prompt's tokens, over all its chunks, become one embedding.

A runner adds up hidden states in each step, so that a chunk costs one vector on its way from the device.
"""

import numpy as np

from services.config import Pooling


class PromptPool:
    """The sum of hidden states of one prompt so far, for the way of pooling that its request names."""

    def __init__(self, pooling: Pooling, length: int) -> None:
        """length: of the prompt, in tokens."""
        self._pooling = pooling
        self._length = length
        self._sum: np.ndarray | None = None

    def wanted(self, start: int, end: int) -> range:
        """Returns the positions from `start` to `end`, a chunk's, whose hidden states are pooled; maybe none."""
        match self._pooling:
            case Pooling.LAST:
                return range(max(start, self._length - 1), end)
            case Pooling.CLS:
                return range(start, min(end, 1))
            case Pooling.MEAN:
                return range(start, end)

    def add(self, hidden: np.ndarray) -> None:
        """Adds the sum of a chunk's hidden states, float32[size]."""
        self._sum = hidden if self._sum is None else self._sum + hidden

    def embedding(self) -> np.ndarray:
        """Returns float32[size] once all chunks were added."""
        assert self._sum is not None
        return self._sum / np.float32(self._length) if self._pooling is Pooling.MEAN else self._sum
