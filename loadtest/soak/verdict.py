"""The demands on a run, its verdict, and its table."""

import math
from collections import Counter
from dataclasses import dataclass, field

from loadtest.ledger import Leftovers
from loadtest.soak.memory import Growth
from loadtest.soak.schedule import SPARED, Kind
from loadtest.soak.traffic import Counts
from loadtest.tables import markdown

MAX_GROWTH_MIB = 24.0  # of a process, from the end of the first quarter to the end
_IN_20_MINUTES_EACH, _IN_20_MINUTES_FAULTS, _IN_20_MINUTES_FINISHED = 3, 60, 2000
_IN_20_MINUTES_GRPC, _IN_20_MINUTES_BACKGROUND = 300, 100


@dataclass(frozen=True, slots=True)
class Demands:
    """The least that must have happened in a run, for it to say anything."""

    faults_of_each_kind: int
    faults: int
    finished: int
    grpc: int
    background: int


def demands(minutes: float) -> Demands:
    """Returns the demands on a run: those on 20 minutes, in proportion."""
    share = minutes / 20
    each, faults, finished = (
        math.floor(share * number) for number in (_IN_20_MINUTES_EACH, _IN_20_MINUTES_FAULTS, _IN_20_MINUTES_FINISHED)
    )
    grpc, background = (math.floor(share * number) for number in (_IN_20_MINUTES_GRPC, _IN_20_MINUTES_BACKGROUND))
    return Demands(each, faults, max(1, finished), grpc, background)


@dataclass(frozen=True, slots=True)
class Result:
    """All that came of a run.

    moved: requests with a further attempt, by the gateways' logs.
    ended_by_themselves, unclean: processes that ended though nobody told them to, or with another exit code than 0.
    """

    seed: int
    minutes: float
    counts: Counts
    faults: Counter[Kind]
    moved: int
    left: Leftovers
    growths: list[Growth]
    ended_by_themselves: Counter[str] = field(default_factory=Counter)
    unclean: Counter[str] = field(default_factory=Counter)
    outlasted: int = 0

    @property
    def lost(self) -> int:
        return self.counts.lost.total()


def complaints(result: Result) -> list[str]:
    """All that makes the run red; none when it is green."""
    asked, counts, left = demands(result.minutes), result.counts, result.left
    found = []
    if result.lost:
        found.append(f"{result.lost} requests were lost")
    if counts.wrong:
        found.append(f"{counts.wrong} answers were wrong")
    if left:
        found.append(f"leaked: {left.blocks} blocks, {left.entries} ledger entries, {left.sequences} sequences")
    if counts.finished < asked.finished:
        found.append(f"{counts.finished} requests finished, {asked.finished} must")
    for what, number, least in (
        ("gRPC streams", counts.grpc, asked.grpc),
        ("background responses", counts.background, asked.background),
    ):
        if number < least:
            found.append(f"{number} {what}, at least {least} must be")
    if result.faults.total() < asked.faults:
        found.append(f"{result.faults.total()} faults, at least {asked.faults} must be")
    found += [
        f"{result.faults[kind]} times: {kind}; at least {asked.faults_of_each_kind} must be"
        for kind in Kind
        if result.faults[kind] < asked.faults_of_each_kind
    ]
    for growth in result.growths:
        if growth.mib > MAX_GROWTH_MIB:
            found.append(f"{growth.name} grew by {growth.mib:.1f} MiB, more than {MAX_GROWTH_MIB:g}")
    if asked.faults_of_each_kind:  # a shorter run is too short for it
        for name in sorted(SPARED - {growth.name for growth in result.growths}):
            found.append(f"{name} did not live from the first quarter on: its memory was not measured")
    return found


def table(result: Result) -> str:
    """Writes the figures, the faults and the memory as Markdown."""
    counts, left = result.counts, result.left
    figures: list[tuple[str, object]] = [
        ("seed", result.seed),
        ("minutes", f"{result.minutes:g}"),
        ("requests over HTTP and gRPC", counts.requests),
        ("of them gRPC streams", counts.grpc),
        ("background responses", counts.background),
        ("finished", counts.finished),
        ("aborted by their clients", counts.aborted),
        ("moved: had a further attempt", result.moved),
        ("failed in words", counts.failed.total()),
        ("lost", result.lost),
        ("wrong", counts.wrong),
        ("leaked blocks", left.blocks),
        ("leaked ledger entries", left.entries),
        ("leaked sequences", left.sequences),
        ("asked again: their gateway was killed", counts.gateway_killed),
        ("begun again: Redis ended with their answers", counts.forgotten),
        ("asked again: no gateway took the connection", counts.sent_elsewhere),
        ("longest pause in a stream, s", f"{counts.longest_pause_s:.2f}"),
        ("longest time to a first chunk, s", f"{counts.longest_first_s:.2f}"),
        ("faults", result.faults.total()),
        ("drains that outlasted their time", result.outlasted),
    ]
    parts = [markdown(("figure", "value"), [(name, str(value)) for name, value in figures])]
    parts.append(markdown(("fault", "times"), [(str(kind), str(result.faults[kind])) for kind in Kind]))
    if result.growths:
        lines = [
            (each.name, f"{each.before_mib:.1f}", f"{each.after_mib:.1f}", f"{each.mib:+.1f}")
            for each in result.growths
        ]
        parts.append(markdown(("memory, MiB", "after a quarter", "at the end", "growth"), lines))
    for title, counter in (
        ("failed with", counts.failed),
        ("lost", counts.lost),
        ("ended by itself", result.ended_by_themselves),
        ("ended uncleanly", result.unclean),
    ):
        if counter:
            parts.append(markdown((title, "times"), [(name, str(number)) for name, number in counter.most_common()]))
    return "\n\n".join(parts) + "\n"
