"""The result of a comparison as Markdown: machine and versions, a table for each contest, and faults of runs."""

from collections.abc import Sequence

from loadtest.compare.machine import Facts
from loadtest.compare.ratios import Contest, Line, Spread, compare
from loadtest.compare.rounds import Run
from loadtest.compare.servers import Server
from loadtest.tables import markdown

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
    """Writes the whole document."""
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
        if lines := compare(runs, contest):
            parts.append(f"## {contest.title}\n\n{markdown(_HEAD, map(_cells, lines))}")
    if faults := [_fault(run, run.fault) for run in runs if run.fault]:
        parts.append("## What went wrong\n\n" + "\n".join(faults))
    return "\n\n".join(parts) + "\n"


def _fault(run: Run, fault: str) -> str:
    return f"- round {run.round}, {run.server}, {run.workload}: {fault.splitlines()[0]}"


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.workload,
        line.figure.value,
        _spread(line.baton),
        _spread(line.peer),
        line.setting,
        f"**{line.ratio.median:.2f}** ({line.ratio.low:.2f}–{line.ratio.high:.2f})",
        f"{line.ttft_ratio.median:.2f} ({line.ttft_ratio.low:.2f}–{line.ttft_ratio.high:.2f})",
        f"{line.tpot_ratio.median:.2f} ({line.tpot_ratio.low:.2f}–{line.tpot_ratio.high:.2f})",
        " / ".join(map(_digits, line.second_token_ms)),
        "" if line.handed_off is None else f"{line.handed_off:.0%}",
    )


def _spread(spread: Spread) -> str:
    return f"{_digits(spread.median)} ({_digits(spread.low)}–{_digits(spread.high)})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
