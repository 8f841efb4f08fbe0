"""The outcomes of a run in columns: a few numbers for each request, and the times between parts, of which it keeps a
bounded number.

Times between parts are exact up to `MAX_GAPS`. Of more, every second one is left out, by chance, and so on: percentiles
are then those of a sample of at least half so many; means and numbers stay exact.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadtest.bench.outcome import Outcome

MAX_GAPS = 2_000_000
_MAX_KINDS, _MAX_TEXTS = 50, 20  # of failures
_OTHER_KIND = "other"
_ITL_PERCENTILE = 99  # of one request's gaps, by which it keeps an SLO
_NONE = float("nan")

Numbers = NDArray[np.float64]


class Column(NamedTuple):
    """Numbers of one request, in the order of the columns. Times are in seconds; NaN: there is none."""

    sent_s: float
    first_s: float
    last_s: float
    output_tokens: float
    input_tokens: float
    second_token_s: float  # between the first part and the second
    itl_s: float  # the 99th percentile of its gaps
    late_s: float  # it was sent so much later than it was due
    connect_s: float
    status: float  # of a refusal


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of some requests as arrays of one length: see `Column`."""

    sent_s: Numbers
    first_s: Numbers
    last_s: Numbers
    output_tokens: Numbers
    input_tokens: Numbers
    second_token_s: Numbers
    itl_s: Numbers
    late_s: Numbers
    connect_s: Numbers
    status: Numbers

    @property
    def ttft_s(self) -> Numbers:
        """Seconds from the sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> Numbers:
        """Seconds from the sending to the last token."""
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> Numbers:
        """Mean seconds per token after the first; NaN of one that is alone."""
        further = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last_s - self.first_s) / further

    def __len__(self) -> int:
        return len(self.sent_s)


class Gaps:
    """Seconds between two parts, each with the moment of the second one."""

    def __init__(self, limit: int = MAX_GAPS) -> None:
        self._limit = limit
        self._random = np.random.default_rng(0)
        self._moments: list[Numbers] = []
        self._gaps: list[Numbers] = []
        self._num_kept = 0
        self.number = 0
        self.total_s = 0.0
        self.share = 1.0  # of those that are kept

    def add(self, parts_s: Numbers, gaps: Numbers) -> None:
        """Adds the gaps of one answer."""
        self.number += len(gaps)
        self.total_s += float(gaps.sum())
        kept = slice(None) if self.share == 1 else self._random.random(len(gaps)) < self.share
        self._keep(parts_s[1:][kept], gaps[kept])
        while self._num_kept > self._limit:
            self._halve()

    def _keep(self, moments: Numbers, gaps: Numbers) -> None:
        self._moments.append(moments)
        self._gaps.append(gaps)
        self._num_kept += len(gaps)

    def _halve(self) -> None:
        moments, gaps = self.moments_s, self.gaps_s
        self._moments, self._gaps, self._num_kept = [], [], 0
        self.share /= 2
        kept = self._random.random(len(gaps)) < 0.5
        self._keep(moments[kept], gaps[kept])

    @property
    def moments_s(self) -> Numbers:
        """The moments at which the gaps that are kept ended."""
        return np.concatenate([*self._moments, np.empty(0)])

    @property
    def gaps_s(self) -> Numbers:
        """The gaps that are kept."""
        return np.concatenate([*self._gaps, np.empty(0)])


class Outcomes:
    """All outcomes of a run. began_s: the moment from which its schedule counts; None: that of the first request."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        self.gaps = Gaps()
        self.failures: Counter[str] = Counter()  # by kind
        self.failure_texts: list[str] = []  # different ones
        self.unfinished = 0  # requests that were open when the run was stopped
        self.skipped = 0  # turns of conversations that were not sent: the one before failed, or time was over
        self.without_usage = 0
        self.waited = 0  # scripts, for a place of --concurrency
        self.unsent = 0  # scripts of these whose place came when the time was over
        self.num_checked = self.num_valid = 0  # answers whose form was looked at, and those that have it
        self._good = array("d")
        self._failed = array("d")

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Outcomes":
        """Collects outcomes that are at hand."""
        collected = cls()
        for outcome in outcomes:
            collected.add(outcome)
        return collected

    def add(self, outcome: Outcome) -> None:
        """Adds an outcome, whose own lists are no longer needed then."""
        if outcome.failure is not None:
            self._add_failure(outcome.failure.kind, outcome.failure.text)
            self._failed.extend(_column(outcome, np.empty(0)))
            return
        self.without_usage += not outcome.has_usage
        parts_s = np.array(outcome.parts_s)
        gaps = parts_s[1:] - parts_s[:-1]
        self.gaps.add(parts_s, gaps)
        self._good.extend(_column(outcome, gaps))

    def _add_failure(self, kind: str, text: str) -> None:
        known = kind in self.failures or len(self.failures) < _MAX_KINDS
        self.failures[kind if known else _OTHER_KIND] += 1
        if len(self.failure_texts) < _MAX_TEXTS and text not in self.failure_texts:
            self.failure_texts.append(text)

    @property
    def good(self) -> Table:
        """The requests that were answered."""
        return _table(self._good)

    @property
    def failed(self) -> Table:
        """The requests that failed; `last_s` is when they ended, and `first_s` the same where no token came before."""
        return _table(self._failed)


def _column(outcome: Outcome, gaps: Numbers) -> Column:
    parts = outcome.parts_s
    return Column(
        sent_s=outcome.sent_s,
        first_s=parts[0] if parts else _NONE,
        last_s=parts[-1] if parts else _NONE,
        output_tokens=outcome.output_tokens,
        input_tokens=_NONE if outcome.input_tokens is None else outcome.input_tokens,
        second_token_s=float(gaps[0]) if len(gaps) else _NONE,
        itl_s=_percentile(gaps, _ITL_PERCENTILE) if len(gaps) else _NONE,
        late_s=_NONE if outcome.due_s is None else outcome.sent_s - outcome.due_s,
        connect_s=_NONE if outcome.connected_s is None else outcome.connected_s - outcome.sent_s,
        status=_NONE if outcome.failure is None or outcome.failure.status is None else outcome.failure.status,
    )


def _percentile(numbers: Numbers, percent: float) -> float:
    """The percentile of a few numbers as `np.percentile` has it, which takes ten times as long for them."""
    ordered = np.sort(numbers)
    place, share = divmod(percent / 100 * (len(ordered) - 1), 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    return float(low + share * (high - low))


def _table(numbers: "array[float]") -> Table:
    columns = np.array(numbers).reshape(-1, len(Column._fields))
    return Table(*columns.T)
