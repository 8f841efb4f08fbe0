"""The points of a run's plots: few enough for a page, however many requests there were."""

from dataclasses import dataclass

import numpy as np

from loadtest.bench.outcomes import Outcomes, Table

_NUM_SHARES = 200  # steps of a distribution
_NUM_MOMENTS, _OF_A_RATE = 240, 5  # moments of timelines; of one number of tokens a second
_MAP_SECONDS, _MAP_TIMES = 96, 36  # cells of the heat map
_SHORTEST_S = 1e-6  # of a timeline
_SHORTEST_GAP_MS, _SHORTEST_SHARE = 0.01, 0.01  # of the heat map: what is shorter is at its lower edge


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in milliseconds of which the shares, from 0 to 1, are no longer."""

    shares: list[float]
    ttft_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Requests at moments, in seconds after the start. waiting: sent and without a token; running: with one."""

    seconds: list[float]
    waiting: list[int]
    running: list[int]
    output_tokens_per_s: list[float]


@dataclass(frozen=True, slots=True)
class GapMap:
    """Numbers of times between parts, by when they ended and how long they were: `counts[of time][of length]`.

    seconds, ms: edges of the cells, one more than cells. Of a sample, the numbers are what all would be about.
    """

    seconds: list[float]
    ms: list[float]
    counts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Plots:
    """The points of all plots; of a plot without any request None."""

    distribution: Distribution | None
    timeline: Timeline | None
    gap_map: GapMap | None


def plots(outcomes: Outcomes) -> Plots:
    """Reduces outcomes to points."""
    good = outcomes.good
    if not len(good):
        return Plots(None, None, None)
    began_s = float(good.sent_s.min()) if outcomes.began_s is None else outcomes.began_s
    return Plots(_distribution(good, outcomes.gaps.gaps_s), _timeline(outcomes, began_s), _gap_map(outcomes, began_s))


def _distribution(good: Table, gaps_s: np.ndarray) -> Distribution:
    shares = np.linspace(0, 1, _NUM_SHARES + 1)
    times = [_quantiles(seconds, shares) for seconds in (good.ttft_s, gaps_s, good.e2e_s)]
    return Distribution(_rounded(shares), *times)


def _quantiles(seconds: np.ndarray, shares: np.ndarray) -> list[float]:
    return _rounded(1e3 * np.quantile(seconds, shares)) if len(seconds) else []


def _timeline(outcomes: Outcomes, began_s: float) -> Timeline:
    good, failed = outcomes.good, outcomes.failed
    ended_s = np.concatenate([good.last_s, failed.last_s[~np.isnan(failed.last_s)]])
    edges = np.linspace(began_s, max(ended_s.max(), began_s + _SHORTEST_S), _NUM_MOMENTS + 1)
    sent = _until(np.concatenate([good.sent_s, failed.sent_s]), edges)
    first = _until(np.concatenate([good.first_s, failed.first_s]), edges)
    last = _until(ended_s, edges)
    return Timeline(
        seconds=_rounded(edges - began_s),
        waiting=(sent - first).tolist(),
        running=(first - last).tolist(),
        output_tokens_per_s=_rounded(_tokens_per_s(outcomes, edges)),
    )


def _until(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts how many of the moments have come by each edge."""
    return np.searchsorted(np.sort(moments[~np.isnan(moments)]), edges, side="right")


def _tokens_per_s(outcomes: Outcomes, edges: np.ndarray) -> np.ndarray:
    """Tokens a second up to each edge; the first is 0. A part of an answer counts as its share of tokens."""
    good, gaps, between = outcomes.good, outcomes.gaps, edges[::_OF_A_RATE]
    parts = np.histogram(gaps.moments_s, between)[0] / gaps.share + np.histogram(good.first_s, between)[0]
    tokens = parts * (good.output_tokens.sum() / max(parts.sum(), 1.0))
    return np.concatenate([[0.0], np.repeat(tokens / np.diff(between), _OF_A_RATE)])


def _gap_map(outcomes: Outcomes, began_s: float) -> GapMap | None:
    gaps_ms = 1e3 * outcomes.gaps.gaps_s
    if not len(gaps_ms):
        return None
    gaps_ms = np.maximum(gaps_ms, max(float(np.quantile(gaps_ms, _SHORTEST_SHARE)), _SHORTEST_GAP_MS))
    seconds = outcomes.gaps.moments_s - began_s
    longest = max(float(gaps_ms.max()), 2 * float(gaps_ms.min()))
    of_lengths = np.geomspace(gaps_ms.min() * 0.999, longest * 1.001, _MAP_TIMES + 1)
    of_time = np.linspace(0.0, max(float(seconds.max()), _SHORTEST_S), _MAP_SECONDS + 1)
    counts = np.histogram2d(seconds, gaps_ms, (of_time, of_lengths))[0] / outcomes.gaps.share
    return GapMap(_rounded(of_time), _rounded(of_lengths), counts.round().astype(int).tolist())


def _rounded(numbers: np.ndarray) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers]
