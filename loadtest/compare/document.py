"""The result as Markdown: what ran where, a table for each contest, and what went wrong."""

from collections.abc import Iterable, Sequence

from loadtest.compare.machine import Facts
from loadtest.compare.ratios import Contest, Row, Spread, compare
from loadtest.compare.rounds import Run
from loadtest.compare.servers import Server

_HEAD = (
    "workload",
    "figure",
    "Baton",
    "peer",
    "its setting",
    "ratio",
    "TTFT",
    "TPOT",
    "to token 2, ms",
    "handed off",
)


def document(facts: Facts, servers: Sequence[Server], contests: Sequence[Contest], runs: Sequence[Run]) -> str:
    """All of it."""
    num_rounds = max((run.round for run in runs), default=0)
    parts = [
        "# Baton and its peers",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        "\n".join(f"- `{server.name}`: {server.setting}" for server in servers),
        f"Rounds: {num_rounds}. In each, all servers are started anew and get the same fresh prompts. A cell is the "
        "median over the rounds, with the smallest and the largest. Ratios are of each round, and above 1 Baton is "
        "ahead; those of TTFT and TPOT (means over the requests) are the peer's time over Baton's. The time from the "
        "first token to the second, in which a handoff shows, is Baton's and the peer's.",
    ]
    for contest in contests:
        if rows := compare(runs, contest):
            parts.append(f"## {contest.title}\n\n{_table(_HEAD, map(_cells, rows))}")
    if faults := [_fault(run, run.fault) for run in runs if run.fault]:
        parts.append("## What went wrong\n\n" + "\n".join(faults))
    return "\n\n".join(parts) + "\n"


def _fault(run: Run, fault: str) -> str:
    return f"- round {run.round}, {run.server}, {run.workload}: {fault.splitlines()[0]}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.workload,
        row.figure.value,
        _spread(row.baton),
        _spread(row.peer),
        row.setting,
        f"**{row.ratio.median:.2f}** ({row.ratio.low:.2f}–{row.ratio.high:.2f})",
        f"{row.ttft_ratio.median:.2f} ({row.ttft_ratio.low:.2f}–{row.ttft_ratio.high:.2f})",
        f"{row.tpot_ratio.median:.2f} ({row.tpot_ratio.low:.2f}–{row.tpot_ratio.high:.2f})",
        " / ".join(map(_digits, row.second_token_ms)),
        "" if row.handed_off is None else f"{row.handed_off:.0%}",
    )


def _spread(spread: Spread) -> str:
    return f"{_digits(spread.median)} ({_digits(spread.low)}–{_digits(spread.high)})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
