"""Measures prompts on three runners of one model, by turns: in one process, on several ranks, and on as many stages."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from loadtest.micro.rank_turns import a_step, run, runner_of, seconds_of
from loadtest.tables import Record
from services.engine.kernels.cpu.isa import known_isa
from services.engine.runner.base import Runner
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.memory import keep_freed_memory
from services.engine.runner.pieces import pieces_of

_TOKENS = (256, 512, 2048)


def measure(model: Path, stages: int, rounds: int) -> list[Record]:
    """Measures each length: seconds of each round, of which the median counts."""
    keep_freed_memory()
    sizes = ((1, 1), (stages, 1), (1, stages))
    runners = [runner_of(model, max(_TOKENS), ranks=ranks, stages=some) for ranks, some in sizes]
    try:
        return [_of_prompt(runners, tokens, rounds) for tokens in _TOKENS]
    finally:
        for runner in runners:
            if isinstance(runner, GroupRunner):
                runner.close()


def _of_prompt(runners: Sequence[Runner], tokens: int, rounds: int) -> Record:
    step = a_step(runners[0], 1, tokens, 0)
    for runner in runners:
        run(runner, step)  # compiles what it needs
    spent: list[list[float]] = [[] for _ in runners]
    for _ in range(rounds):
        for times, runner in zip(spent, runners, strict=True):
            times.append(seconds_of(runner, step))
    alone, ranks, stages = spent
    ratios = [own / one for one, own in zip(alone, stages, strict=True)]
    return {
        "tokens": tokens,
        "pieces": len(list(pieces_of(step.tokens))),
        "isa": known_isa().name,
        "one_process_ms": median(alone) * 1e3,
        "ranks_ms": median(ranks) * 1e3,
        "stages_ms": median(stages) * 1e3,
        "ratio": median(ratios),
        "ratio_from": min(ratios),
        "ratio_to": max(ratios),
        "ranks_ratio": median([own / one for one, own in zip(alone, ranks, strict=True)]),
    }
