"""Ratios of runs: Baton against the better setting of a peer, round by round. Above 1, Baton is ahead.

Only good runs count: a setting with a fault in one of a workload's runs has no part in its line.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.compare.rounds import Run, value_of
from loadtest.compare.workloads import Figure


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of a figure that has one value for each round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarizes at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Contest:
    """Baton in one mode against a peer: for each workload, the better of the peer's settings counts."""

    title: str
    baton: str  # name of the server
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One workload of a contest, as a line of its table."""

    workload: str
    figure: Figure
    baton: Spread
    peer: Spread
    setting: str  # the peer's better setting
    ratio: Spread  # by `figure`
    ttft_ratio: Spread
    tpot_ratio: Spread
    second_token_ms: tuple[float, float]  # from the first token to the second, Baton's and the peer's: medians
    handed_off: float | None  # the smallest share of Baton's requests, over the rounds


def ratio(ours: float, theirs: float, figure: Figure) -> float:
    """Divides so that a ratio above 1 means that ours is better."""
    return ours / theirs if figure.higher_is_better else theirs / ours


def compare(runs: Sequence[Run], contest: Contest) -> list[Line]:
    """Returns a line for each workload that both sides ran well, in the order of the runs."""
    lines = []
    for workload in dict.fromkeys(run.workload for run in runs):
        ours = _good(runs, contest.baton, workload)
        theirs = [found for peer in contest.peers if (found := _good(runs, peer, workload))]
        if ours and theirs:
            lines.append(_line(ours, _best(theirs)))
    return lines


def _good(runs: Sequence[Run], server: str, workload: str) -> list[Run]:
    """Returns a server's runs of a workload, one for each round; none if one has a fault."""
    found = [run for run in runs if (run.server, run.workload) == (server, workload)]
    return [] if any(run.fault for run in found) else sorted(found, key=lambda run: run.round)


def _best(settings: Sequence[list[Run]]) -> list[Run]:
    """Picks the setting with the best median."""
    better = max if settings[0][0].figure.higher_is_better else min
    return better(settings, key=lambda runs: statistics.median(run.value for run in runs))


def _second_token_ms(runs: list[Run]) -> float:
    """Returns the median over the rounds; 0 for a round in which no answer came in more than one part."""
    return statistics.median(run.report.second_token_ms.mean if run.report.second_token_ms else 0.0 for run in runs)


def _line(ours: list[Run], theirs: list[Run]) -> Line:
    figure = ours[0].figure

    def ratios(of: Figure) -> Spread:
        pairs = zip(ours, theirs, strict=True)
        return Spread.of([ratio(value_of(a.report, of), value_of(b.report, of), of) for a, b in pairs])

    shares = [run.report.handed_off for run in ours if run.report.handed_off is not None]
    return Line(
        workload=ours[0].workload,
        figure=figure,
        baton=Spread.of([run.value for run in ours]),
        peer=Spread.of([run.value for run in theirs]),
        setting=theirs[0].server,
        ratio=ratios(figure),
        ttft_ratio=ratios(Figure.TTFT_MS),
        tpot_ratio=ratios(Figure.TPOT_MS),
        second_token_ms=(_second_token_ms(ours), _second_token_ms(theirs)),
        handed_off=min(shares, default=None),
    )
