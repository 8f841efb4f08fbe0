"""Measures steps on three runners of one model with experts, by turns: in one process, on ranks that have columns of
all experts, and on ranks that have whole experts.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from loadtest.micro.rank_turns import Way, a_step, in_turns, loaded_runners, ratios_of
from loadtest.tables import Record
from services.engine.expert_imbalance import imbalance_of, pairs_of_ranks
from services.engine.kernels.cpu.isa import known_isa
from services.engine.runner.base import Runner, StepInput

_STEPS = ((1, 1), (16, 1), (64, 1), (1, 512))  # rows, and new tokens of each


def measure(model: Path, ranks: int, context: int, rounds: int) -> list[Record]:
    """Measures each kind of step: seconds of each round, of which the median counts. context: tokens of each sequence
    before a step that decodes.
    """
    most_tokens = max(rows * (context + new) for rows, new in _STEPS)
    with loaded_runners(model, most_tokens, (Way(), Way(ranks), Way(ranks, whole_experts=True))) as runners:
        return [_of_step(runners, rows, new, context if new == 1 else 0, rounds) for rows, new in _STEPS]


def _of_step(runners: Sequence[Runner], rows: int, new: int, context: int, rounds: int) -> Record:
    step = a_step(runners[0], rows, new, context)
    alone, columns, whole = in_turns(runners, step, rounds)
    return {
        "rows": rows,
        "tokens": rows * new,
        "context": context,
        "isa": known_isa().name,
        "one_process_ms": median(alone) * 1e3,
        "columns_ms": median(columns) * 1e3,
        "whole_ms": median(whole) * 1e3,
        **ratios_of(whole, columns),
        "busiest_rank": _busiest_rank(runners[2], step),
    }


def _busiest_rank(runner: Runner, step: StepInput) -> float:
    """Returns how many pairs of a token and an expert the busiest rank of a step has over the mean of the ranks, the
    mean over layers.
    """
    step.counts_experts = True
    counts = []
    for _ in range(2):
        runner.launch(step)
        counts.append(runner.collect().expert_pairs)
    step.counts_experts = False
    earlier, later = counts
    assert earlier is not None
    assert later is not None
    imbalance = imbalance_of(pairs_of_ranks(later - earlier, runner.experts_of_ranks))
    assert imbalance is not None
    return imbalance.mean
