"""Models over KV in codes of one byte, beside `transformers` with a cache that rounds in the same way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from services.config import KvCacheDtype
from services.engine.engine import Engine
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request_table import State
from tests.checkpoints import write_checkpoint
from tests.engine.harness import Driven
from tests.engine.kernels import codes
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.engine.test_load_plan import with_scales
from tests.engine.test_torch_runner import load

KINDS = (KvCacheDtype.INT8, KvCacheDtype.FP8)
_DTYPES = {KvCacheDtype.INT8: "int8", KvCacheDtype.FP8: "float8_e4m3fn"}


class RoundedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """Keeps what codes stand for. scales: static ones, float32[layers, 2, kv_heads]."""

    def __init__(self, config: Any, dtype: str, scales: torch.Tensor | None = None) -> None:
        super().__init__(config=config)
        self._dtype, self._scales = dtype, scales

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **options: Any) -> Any:
        """Rounds K and V, [1, kv_heads, tokens, head_dim]."""
        rounded = (self._round(some, layer, plane) for plane, some in enumerate((key, value)))
        return super().update(*rounded, layer, *args, **options)

    def _round(self, numbers: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
        own = None if self._scales is None else self._scales[layer, plane][None, :, None].expand(numbers.shape[:3])
        coded, scales = codes.encode(numbers, self._dtype, own)
        return codes.decode(coded, self._dtype, scales).to(numbers.dtype)


def expected(directory: Path, kind: KvCacheDtype, prompt: list[int], count: int, scales: Any = None) -> Any:
    """Greedy tokens, and log-probabilities [count, vocab]."""
    reference = Reference(directory)
    cache = RoundedCache(reference._model.config, _DTYPES[kind], scales)
    return reference.run(prompt, count, past_key_values=cache)


def check(directory: Path, kind: KvCacheDtype, scales: Any = None, **options: Any) -> None:
    """Tokens in chunks of several sizes, some rows decoding beside others; log-probabilities are near.

    Where K is computed in another order, a code may be the next one: so little differs.
    """
    runner = load(directory, block_size=8, kv_cache_dtype=kind, **options)
    assert runner.layout.dtype == _DTYPES[kind]
    assert runner.layout.token_scales == (scales is None)
    prompts = prompts_of([5, 21, 60])
    found = [expected(directory, kind, prompt, 12, scales) for prompt in prompts]
    for chunk in (64, 13, 1):
        compared = 0
        for row, (tokens, logprobs) in zip(run_greedy(runner, prompts, 12, chunk, 0), found, strict=True):
            best = logprobs.topk(2).values
            unsure = (best[:, 0] - best[:, 1] < 0.01).nonzero()
            certain = int(unsure[0]) if len(unsure) else len(tokens)
            assert row.generated[:certain] == tokens[:certain]
            for at in range(certain):
                assert row.logprobs[at][0] == pytest.approx(float(logprobs[at, tokens[at]]), abs=5e-3)
            compared += certain
        assert compared > 8, "the model is sure of too few tokens for this test"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_cache_that_rounds_alike(kind: KvCacheDtype, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path / "model"), kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3"])
def test_windows_in_slices_caps_and_sinks(family: str, kind: KvCacheDtype, tmp_path: Path) -> None:
    shape: dict[str, Any] = {} if family == "qwen3" else {"sliding_window": 20}
    check(write_checkpoint(tmp_path / "model", family, **shape), kind)


@pytest.mark.long
def test_static_scales_are_the_checkpoint_s(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "model")
    scales = torch.tensor([[[0.01, 0.02], [0.03, 0.015]], [[0.02, 0.01], [0.025, 0.04]]])
    check(with_scales(plain, tmp_path / "scaled", scales), KvCacheDtype.FP8, scales)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_and_cached_sequences_give_the_tokens_of_one_alone(kind: KvCacheDtype, tmp_path: Path) -> None:
    """What is read from blocks is what was rounded, whoever computed it, and when."""
    directory = write_checkpoint(tmp_path / "model")
    runner = load(directory, block_size=8, kv_cache_dtype=kind)
    prompts = prompts_of([40, 60, 50])
    alone = [run_greedy(runner, [prompt], 30, 16)[0].generated for prompt in prompts]
    small = load(directory, block_size=8, kv_cache_dtype=kind, kv_memory_bytes=22 * runner.layout.block_bytes)
    small.kv_memory().array[:] = 0xFF
    scheduler = DecodeScheduler(64, prefill_chunk=16)
    driven = Driven(Engine(small, scheduler, max_num_seqs=4, max_model_len=120, eos_token_ids=()))
    handles, preempted = [driven.submit(prompt, 30) for prompt in prompts], 0
    while driven.step():
        preempted += len(list(driven.engine.sequences.requests.in_state(State.PREEMPTED)))
    assert preempted
    assert [driven.tokens[handle] for handle in handles] == alone
    turn = prompts[2] + alone[2][:20]
    again = driven.submit(turn, 10)
    driven.run()
    assert driven.cached[again] > 16
    assert driven.tokens[again] == alone[2][20:]
    driven.assert_baseline()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_block_has_its_scales(kind: KvCacheDtype, tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path / "model"), block_size=8, kv_cache_dtype=kind)
    array = runner.kv_memory().array
    array[1] = np.random.default_rng(0).integers(0, 256, array.shape[1], dtype=np.uint8)
    runner.copy_block(1, 3)
    assert (array[3] == array[1]).all()
    assert array.shape[1] == 2 * 2 * 2 * 8 * (16 + 4)  # heads, layers, K and V, positions, codes and a scale
