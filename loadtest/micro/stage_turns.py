"""Measures prompts on three runners of one model, by turns: in one process, on several ranks, and on as many stages."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from loadtest.micro.rank_turns import Way, a_step, in_turns, loaded_runners, ratios_of
from loadtest.tables import Record
from services.engine.kernels.cpu.isa import known_isa
from services.engine.runner.base import Runner
from services.engine.runner.pieces import pieces_of

_TOKENS = (256, 512, 2048)


def measure(model: Path, stages: int, rounds: int) -> list[Record]:
    """Measures each length: seconds of each round, of which the median counts."""
    with loaded_runners(model, max(_TOKENS), (Way(), Way(ranks=stages), Way(stages=stages))) as runners:
        return [_of_prompt(runners, tokens, rounds) for tokens in _TOKENS]


def _of_prompt(runners: Sequence[Runner], tokens: int, rounds: int) -> Record:
    step = a_step(runners[0], 1, tokens, 0)
    alone, ranks, stages = in_turns(runners, step, rounds)
    return {
        "tokens": tokens,
        "pieces": len(list(pieces_of(step.tokens))),
        "isa": known_isa().name,
        "one_process_ms": median(alone) * 1e3,
        "ranks_ms": median(ranks) * 1e3,
        "stages_ms": median(stages) * 1e3,
        **ratios_of(stages, alone),
        "ranks_ratio": ratios_of(ranks, alone)["ratio"],
    }
