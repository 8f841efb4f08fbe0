"""Embeddings: hidden states of prompts, as `transformers` has them, pooled over chunks, caches and batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.ids import AttemptId
from services.config import DeviceKind, Pooling
from services.config.engine import EngineConfig
from services.engine.engine import Engine
from services.engine.runner.base import Runner, StepInput
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.engine.schedulers.prefill import PrefillScheduler
from services.protocol.outcomes import FailureCode
from tests.checkpoints import write_checkpoint
from tests.engine.harness import GATEWAY, Driven, make_engine
from tests.engine.oracle import Reference, prompts_of

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "opt-norm-first": ("opt", {}),
    "opt-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}


def pooled(states: torch.Tensor, pooling: Pooling) -> list[float]:
    """The embedding by its definition."""
    wanted = {Pooling.LAST: states[-1], Pooling.MEAN: states.mean(dim=0), Pooling.CLS: states[0]}[pooling]
    return [float(value) for value in wanted]


def driven_over(runner: Runner, budget: int, max_num_seqs: int = 32) -> Driven:
    """An engine with the prefill policy, which computes so many tokens in a step."""
    scheduler = PrefillScheduler(budget)
    return Driven(Engine(runner, scheduler, max_num_seqs=max_num_seqs, max_model_len=256, eos_token_ids=()))


def load(directory: Path, **options: Any) -> Runner:
    chosen = {"kv_memory_bytes": 8 << 20, "num_threads": 1, "block_size": 8, **options}
    return load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, **chosen)).runner


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("budget", [13, 1000])
def test_embeddings_equal_the_hidden_states_of_transformers(name: str, budget: int, tmp_path: Path) -> None:
    """Every way of pooling, prompts of one token and of many chunks, several in a step; twice, the second time with
    what the prefix cache has.
    """
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    reference, prompts = Reference(directory), prompts_of([1, 8, 37, 90])
    runner = load(directory)
    driven = driven_over(runner, budget)
    for again in (False, True):
        handles = {
            (pooling, index): driven.embed(prompt, pooling)
            for pooling in Pooling
            for index, prompt in enumerate(prompts)
        }
        driven.run()
        for (pooling, index), handle in handles.items():
            expected = pooled(reference.hidden_states(prompts[index]), pooling)
            assert len(expected) == runner.embedding_size
            assert driven.embeddings[handle].dtype == np.float32
            assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=2e-5)
        if again:
            assert [driven.cached[handles[Pooling.LAST, index]] for index in range(4)] == [0, 0, 32, 88]
            assert [driven.cached[handles[pooling, 3]] for pooling in (Pooling.MEAN, Pooling.CLS)] == [0, 0]
    driven.assert_baseline()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_summed_up_in_float32(dtype: str, tmp_path: Path) -> None:
    """A mean of many: sums in half precision would be off by far more."""
    directory = write_checkpoint(tmp_path / "model", dtype=getattr(torch, dtype))
    prompt = prompts_of([200])[0]
    driven = driven_over(load(directory), 50)
    handle = driven.embed(prompt, Pooling.MEAN)
    driven.run()
    expected = Reference(directory).hidden_states(prompt).mean(dim=0).tolist()
    assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=0.02)


def test_many_prompts_are_computed_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    launch = TorchRunner.launch

    def counted(self: TorchRunner, step: StepInput) -> None:
        sizes.append((len(step.tokens.seq_lens), len(step.sampled)))
        launch(self, step)

    monkeypatch.setattr(TorchRunner, "launch", counted)
    driven = driven_over(load(write_checkpoint(tmp_path / "model")), 1000)
    handles = [driven.embed(prompt, Pooling.LAST) for prompt in prompts_of([9] * 20)]
    driven.run()
    assert sizes == [(20, 0)]
    assert driven.embeddings.keys() == set(handles)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pooling", Pooling)
def test_chunks_beside_other_work_and_a_step_ahead(pooling: Pooling, depth: int) -> None:
    """Prompts to hand off and to embed share steps; those that are aborted half-way leave no block and no sum."""
    driven = make_engine(scheduler=PrefillScheduler(7), depth=depth)
    prompts = [[seed * 13 + index for index in range(length)] for seed, length in enumerate([30, 3, 19, 26])]
    handles = [driven.embed(prompt, pooling) for prompt in prompts]
    first_token = driven.submit(prompts[0], 1)
    for _ in range(4):
        driven.step()
    driven.engine.sequences.free(AttemptId(GATEWAY, handles[3]))
    driven.run()
    for prompt, handle in list(zip(prompts, handles, strict=True))[:3]:
        alone = make_engine(scheduler=PrefillScheduler(1000))
        expected = alone.embed(prompt, pooling)
        alone.run()
        assert driven.embeddings[handle].tolist() == alone.embeddings[expected].tolist()
        last = {Pooling.LAST: len(prompt) - 1, Pooling.CLS: 0, Pooling.MEAN: (len(prompt) - 1) / 2}[pooling]
        assert driven.embeddings[handle][1] == last
    assert handles[3] not in driven.embeddings
    assert len(driven.tokens[first_token]) == 1
    driven.assert_baseline()


def test_embeddings_share_cached_blocks_by_their_salts() -> None:
    driven = make_engine(scheduler=PrefillScheduler(64))
    prompt = list(range(30))
    cached = []
    for salt in ("a", "b", "", "a", ""):
        handle = driven.embed(prompt, Pooling.LAST, salt=salt)
        driven.run()
        cached.append(driven.cached[handle] > 0)
    assert cached == [False, False, False, True, True]
    driven.assert_baseline()


def test_a_prompt_may_fill_the_context() -> None:
    """No token follows it, so it needs no further position."""
    driven = make_engine(scheduler=PrefillScheduler(64), max_model_len=32, num_blocks=8)
    handle = driven.embed(list(range(32)), Pooling.LAST)
    too_long = driven.embed(list(range(33)), Pooling.LAST)
    driven.run()
    assert handle in driven.embeddings
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(too_long, FailureCode.TOO_LARGE)]


def test_a_decode_worker_embeds_nothing() -> None:
    driven = make_engine()
    handle = driven.embed([1, 2, 3], Pooling.LAST)
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(handle, FailureCode.UNSUPPORTED)]
    driven.assert_baseline()


def test_a_deadline_ends_a_prompt_half_way() -> None:
    driven = make_engine(scheduler=PrefillScheduler(4))
    handle = driven.embed(list(range(40)), Pooling.MEAN)
    driven.step()
    driven.engine.sequences.fail_expired(2e9)
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(handle, FailureCode.DEADLINE)]
    assert not driven.embeddings
    driven.assert_baseline()
