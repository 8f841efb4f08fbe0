"""The alternatives of one token: pairs of a token id and its log-probability. Many of them stay in arrays."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from services.protocol.sampling import FEW_ALTERNATIVES


class Alternatives(Sequence[tuple[int, float]]):
    """Pairs that are made when they are read: 8 bytes for each, where tuples take over 100.

    ids: int32[n]; logprobs: float32[n].
    """

    __slots__ = ("ids", "logprobs")

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self.ids = ids
        self.logprobs = logprobs

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, index: slice) -> "Alternatives": ...

    def __getitem__(self, index: int | slice) -> "tuple[int, float] | Alternatives":
        if isinstance(index, slice):
            return Alternatives(self.ids[index], self.logprobs[index])
        return int(self.ids[index]), float(self.logprobs[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Alternatives):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.logprobs, other.logprobs)

    __hash__ = None  # type: ignore[assignment]  # as of other mutable sequences


def alternatives_of(ids: np.ndarray, logprobs: np.ndarray) -> Sequence[tuple[int, float]]:
    """Returns int32[n] ids and float32[n] logprobs as pairs, which do not keep the memory of the arrays."""
    if len(ids) > FEW_ALTERNATIVES:
        return Alternatives(ids.copy(), logprobs.copy())
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def arrays_of(top: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids, int32[n], and the logprobs, float32[n], of pairs."""
    if isinstance(top, Alternatives):
        return top.ids, top.logprobs
    ids, logprobs = [token for token, _ in top], [logprob for _, logprob in top]
    return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)
