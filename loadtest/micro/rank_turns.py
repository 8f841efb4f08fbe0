"""Measures steps of two runners of one model, by turns: one of this process alone, and one of several ranks."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from loadtest.tables import Record
from services.config import LoadFormat
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.runner.base import Runner, SamplingBatch, StepInput, StepTokens
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.group.messages import RankStep, RankThreads
from services.engine.runner.load import load_runner
from services.engine.runner.memory import keep_freed_memory, populate

_STEPS = ((1, 1), (16, 1), (64, 1), (1, 256), (1, 2048))  # rows, and new tokens of each
_BLOCK_SIZE = 16
_SECONDS = 0.8  # of each kind of step, each runner and each round
_LEAST_RUNS = 3


def measure(model: Path, ranks: int, context: int, rounds: int) -> list[Record]:
    """Measures each kind of step: seconds of each round, of which the median counts. context: tokens of each sequence
    before a step that decodes.
    """
    most_tokens = max(rows * (context + new) for rows, new in _STEPS)
    with loaded_runners(model, most_tokens, (Way(), Way(ranks))) as runners:
        return [_of_step(runners, rows, new, context if new == 1 else 0, rounds) for rows, new in _STEPS]


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a model is divided among processes."""

    ranks: int = 1  # of each stage
    stages: int = 1
    whole_experts: bool = False


@contextmanager
def loaded_runners(model: Path, most_tokens: int, ways: Sequence[Way]) -> Iterator[list[Runner]]:
    """Loads a model in each of these ways, with room for so many tokens. All end with the context."""
    keep_freed_memory()
    with ExitStack() as stack:
        runners = []
        for way in ways:
            runners.append(runner := _runner_of(model, most_tokens, way))
            if isinstance(runner, GroupRunner):
                stack.callback(runner.close)
        yield runners


def in_turns(runners: Sequence[Runner], step: StepInput, rounds: int) -> list[list[float]]:
    """Runs a step on one runner after the other, in each round. Returns the seconds of each runner, by round."""
    for runner in runners:
        run(runner, step)  # records it
    spent: list[list[float]] = [[] for _ in runners]
    for _ in range(rounds):
        for times, runner in zip(spent, runners, strict=True):
            times.append(seconds_of(runner, step))
    return spent


def ratios_of(own: Sequence[float], other: Sequence[float]) -> Record:
    """Returns the ratio of one runner's rounds to another's: the median, and from where to where it goes."""
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    return {"ratio": median(ratios), "ratio_from": min(ratios), "ratio_to": max(ratios)}


def _runner_of(model: Path, most_tokens: int, way: Way) -> Runner:
    has_weights = not model.is_dir() or any(model.glob("*.safetensors"))
    engine = EngineConfig(
        model=model,
        load_format=LoadFormat.AUTO if has_weights else LoadFormat.DUMMY,
        max_num_batched_tokens=2048,
        block_size=_BLOCK_SIZE,
        tensor_parallel_size=way.ranks,
        pipeline_parallel_size=way.stages,
        expert_parallel=way.whole_experts,
    )
    runner = load_runner(engine).runner
    assert runner.num_blocks * _BLOCK_SIZE >= most_tokens, "the pool is too small"
    populate(runner.kv_memory(), 0, 2 * most_tokens // _BLOCK_SIZE * runner.layout.block_bytes)
    return runner


def _of_step(runners: Sequence[Runner], rows: int, new: int, context: int, rounds: int) -> Record:
    step = a_step(runners[0], rows, new, context)
    alone, divided = in_turns(runners, step, rounds)
    return {
        "rows": rows,
        "tokens": rows * new,
        "context": context,
        "isa": known_isa().name,
        "one_process_ms": median(alone) * 1e3,
        "ranks_ms": median(divided) * 1e3,
        **ratios_of(divided, alone),
        "message_us": _message_seconds(step) * 1e6,
    }


def a_step(runner: Runner, rows: int, new: int, context: int) -> StepInput:
    """Makes a step of rows with so many new tokens after so many others."""
    length = context + new
    blocks = -(-length // _BLOCK_SIZE)
    rng = np.random.default_rng(0)
    tokens = StepTokens(
        token_ids=rng.integers(0, runner.vocab_size, rows * new, np.int32),
        positions=np.tile(np.arange(context, length, dtype=np.int32), rows),
        query_starts=np.arange(0, rows * new + 1, new, dtype=np.int32),
        seq_lens=np.full(rows, length, dtype=np.int32),
        block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
    )
    return StepInput.of(tokens, np.arange(new - 1, rows * new, new), SamplingBatch.greedy(rows))


def run(runner: Runner, step: StepInput) -> None:
    """Runs a step."""
    runner.launch(step)
    runner.collect()


def seconds_of(runner: Runner, step: StepInput) -> float:
    """Returns the median time of a step."""
    openmp, times = loaded_openmp(), list[float]()
    if openmp is not None:  # rank 0 of a group has set its own number, of which the other runner does not know
        openmp.set_num_threads(len(os.sched_getaffinity(0)))
    until = time.perf_counter() + _SECONDS
    while len(times) < _LEAST_RUNS or time.perf_counter() < until:
        began = time.perf_counter()
        run(runner, step)
        times.append(time.perf_counter() - began)
    return median(times)


def _message_seconds(step: StepInput) -> float:
    """Returns the time in which the message of a step is made."""
    threads, times = RankThreads(1, prompts=False, shares_prompts=False), []
    for number in range(200):
        began = time.perf_counter()
        RankStep(number, threads, step.samples_all, step.parts, step.tokens).pack()
        times.append(time.perf_counter() - began)
    return median(times)
