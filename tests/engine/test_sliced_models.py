"""Models with windows in some layers, on real (tiny, random) weights, behind an engine that frees slices.

Whatever is free is NaN: a step that reads it says so.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.engine.blocks.sliced_pool import SlicedPool
from services.engine.engine import Engine
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request_table import State
from tests.checkpoints import write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, prompts_of
from tests.engine.test_torch_runner import load

BLOCK_SIZE, WINDOW = 8, 20
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "qwen2": (
        "qwen2",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
}


@pytest.fixture(params=["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in SHAPES if name != "gemma3")])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, shape = SHAPES[request.param]
    return write_checkpoint(tmp_path / "model", family, **shape)


def driven_over(directory: Path, num_blocks: int, *, prefill_chunk: int = 16, **options: Any) -> Driven:
    """An engine with room for so many whole blocks."""
    layout = load(directory, block_size=BLOCK_SIZE).layout
    assert layout.groups is not None
    size = num_blocks * layout.num_slices * layout.block_bytes
    runner = load(directory, block_size=BLOCK_SIZE, kv_memory_bytes=size, **options)
    scheduler = DecodeScheduler(64, prefill_chunk=prefill_chunk)
    return Driven(Engine(runner, scheduler, max_num_seqs=6, max_model_len=num_blocks * BLOCK_SIZE, eos_token_ids=()))


def step(driven: Driven) -> bool:
    stepped = driven.step()
    runner, pool = driven.engine.runner, driven.engine.sequences.pool
    assert isinstance(runner, TorchRunner)
    runner.kv_memory().array[pool._free[: pool._num_free]] = 0xFF
    return stepped


def run(driven: Driven) -> None:
    while step(driven):
        pass


def held(driven: Driven) -> int:
    return driven.engine.runner.num_blocks - driven.engine.sequences.pool.available


def sizes(driven: Driven) -> tuple[int, ...]:
    pool = driven.engine.sequences.pool
    assert isinstance(pool, SlicedPool)
    return pool.parts.groups.sizes


def test_chunks_choices_and_next_turns_say_what_transformers_say(model: Path) -> None:
    """Prompts longer than the window; slices held by a long answer are those of its window."""
    driven, reference = driven_over(model, 90), Reference(model)
    prompts = prompts_of([5, 70, 121])
    handles = [driven.submit(prompt, 60) for prompt in prompts]
    of_choices = driven.submit(prompts[1][:50], 30, seeds=(1, 2))
    full, *later = sizes(driven)
    while step(driven):
        slots = np.flatnonzero(driven.engine.sequences.batch.phase == Phase.DECODE)
        if len(slots) == 1 and driven.engine.sequences.requests.num_queued == 0:
            num_blocks = int(driven.engine.sequences.batch.num_blocks[slots[0]])
            assert held(driven) <= full * num_blocks + sum(later) * (-(-WINDOW // BLOCK_SIZE) + 1)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, 60)
    expected = reference.tokens(prompts[1][:50], 30)
    assert [driven.tokens[of_choices + choice] for choice in (1, 2)] == [expected] * 2
    turn = prompts[2] + driven.tokens[handles[2]] + [7, 8, 9]
    again = driven.submit(turn, 20)
    run(driven)
    assert driven.cached[again] == (121 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert driven.tokens[again] == reference.tokens(turn, 20)
    driven.assert_baseline()


@pytest.mark.long
def test_two_long_answers_fit_where_whole_blocks_of_one_would(model: Path) -> None:
    """Each is longer than the pool could hold twice; none is preempted. Then a turn that hits what is left."""
    driven, reference = driven_over(model, 22), Reference(model)
    prompts = prompts_of([10, 20])
    handles = [driven.submit(prompt, 100) for prompt in prompts]
    while step(driven):
        assert not driven.engine.sequences.requests.in_state(State.PREEMPTED)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, 100)
    driven.assert_baseline()


def test_hits_after_slices_were_evicted(model: Path) -> None:
    """Prompts with common beginnings in a pool that is far too small for them."""
    driven, reference = driven_over(model, 15), Reference(model)
    (stem,) = prompts_of([90])
    prompts = [stem[:50] + [9] * 3, stem, stem[:26] + [8] * 40, stem[:50] + [7] * 9, [*stem, 5, 6], [*stem[:50], 9, 4]]
    handles = []
    for prompt in prompts:
        handles.append(driven.submit(prompt, 28))
        for _ in range(9):
            step(driven)
    run(driven)
    assert driven.engine.sequences.pool.num_evicted > 0
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, 28)
    driven.assert_baseline()


@pytest.mark.long
def test_preempted_sequences_are_computed_again(model: Path) -> None:
    driven, reference, preempted = driven_over(model, 10), Reference(model), False
    prompts = prompts_of([10, 11, 12, 13])
    handles = [driven.submit(prompt, 65) for prompt in prompts]
    while step(driven):
        preempted |= bool(driven.engine.sequences.requests.in_state(State.PREEMPTED))
    assert preempted
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, 65)
    driven.assert_baseline()


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_with_kernels_and_without(model: Path, kernels: str) -> None:
    driven, reference = driven_over(model, 60, kernels=kernels, prefill_chunk=64), Reference(model)
    prompts = prompts_of([100, 33])
    handles = [driven.submit(prompt, 25) for prompt in prompts]
    run(driven)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, 25)
