"""Sampling on the GPU as it has to be, in float64 with numpy: the noise, the tokens that are kept, the winner."""

import math
from dataclasses import dataclass

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_SLACK = 3e-6  # of a sum of float32: who is kept because of less may be kept or not


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings of one row."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 to 2**64 - 1
    position: int = 0

    @property
    def is_filtered(self) -> bool:
        """True when the row has filters; a greedy row has no use for them."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def race_numbers(seeds: np.ndarray, positions: np.ndarray, vocab: int) -> np.ndarray:
    """Computes float64[N, vocab]: exponential numbers of tokens, for uint64[N] and int64[N]."""
    with np.errstate(over="ignore"):
        start = _mix(_mix(seeds + _STEP) + _STEP * (positions.astype(np.uint64) + np.uint64(1)))
        numbers = _mix(start[:, None] + _STEP * (np.arange(vocab, dtype=np.uint64) + np.uint64(1))[None, :])
    result: np.ndarray = -np.log1p(-((numbers >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32)
    return result


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def log_weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Computes float64[vocab] relative to the best token, whose weight is 0."""
    top = logits.max()
    base = top if np.isfinite(top) else 0.0
    result: np.ndarray = np.where(logits == top, 0.0, (logits - base) / max(temperature, 1e-5))
    return result


def kept(logits: np.ndarray, settings: Settings, slack: float = 0.0) -> np.ndarray:
    """Computes bool[vocab]: tokens that may be chosen; with `slack` above 0 also those that nearly may, below 0 without
    those that only just may."""
    weights = np.exp(log_weights(logits, settings.temperature))
    weights[(weights < settings.min_p * (1 - slack)) & (logits < logits.max())] = 0
    order = np.argsort(-logits, kind="stable")
    k = settings.top_k if 0 < settings.top_k < len(logits) else len(logits)
    last = k - 1
    if settings.top_p < 1:
        sums = np.cumsum(weights[order])
        reached = np.flatnonzero(sums[:k] >= settings.top_p * sums[k - 1] * (1 + slack))
        last = int(reached[0]) if len(reached) else k - 1
    if last == 0 and settings.is_filtered:
        result: np.ndarray = np.arange(len(logits)) == order[0]
        return result
    result = (logits >= logits[order[last]]) & ((weights > 0) | (logits == logits.max()))
    return result


def lateness(logits: np.ndarray, settings: Settings, token: int) -> float:
    """Computes by which share the race time of `token` exceeds the winner's; infinity if the token may not take part.

    NaN for what is no token at all.
    """
    logits = logits.astype(np.float64)
    if not 0 <= token < len(logits):
        return math.nan
    if settings.temperature == 0:
        return 0.0 if token == int(logits.argmax()) else math.inf
    if not kept(logits, settings, _SLACK)[token]:
        return math.inf
    numbers = race_numbers(np.array([settings.seed], np.uint64), np.array([settings.position]), len(logits))[0]
    times = np.log(numbers) - log_weights(logits, settings.temperature)
    return max(0.0, float(times[token] - times[kept(logits, settings, -_SLACK)].min()))


def at_the_edge(falling: np.ndarray, settings: Settings) -> np.ndarray:
    """Computes float32[vocab]: `falling` logits, dealt out so that a filter off by one token chooses another token.

    The token whose number is lowest comes first of those that are not kept, the one with the next number last of
    those that are. All but equal logits let them win.
    """
    numbers = race_numbers(np.array([settings.seed], np.uint64), np.array([settings.position]), len(falling))[0]
    fastest = np.argsort(numbers)
    num_kept = int(kept(falling.astype(np.float64), settings).sum())
    ranks = np.random.default_rng(settings.seed).permutation(len(falling))
    for token, rank in zip(fastest[:2], (num_kept, num_kept - 1), strict=False):
        if rank < len(falling):
            other = np.flatnonzero(ranks == rank)[0]
            ranks[other], ranks[token] = ranks[token], rank
    result: np.ndarray = falling[ranks].astype(np.float32)
    return result
