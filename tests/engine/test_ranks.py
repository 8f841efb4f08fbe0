"""Ranks of one model, each with its configuration, weights and KV blocks, in threads that join their parts.

Together they compute what `transformers` computes; and their blocks are byte ranges of one worker's blocks.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from services.engine.models.architectures import parse_model_config
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import Row, step
from tests.engine.thread_ranks import Meeting, ThreadRanks
from tests.quantized_checkpoints import WAYS, write_mxfp4, write_quantized

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 24, 16, 24
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama-2": ("llama", {}, 2),
    "llama-2-kv-heads-on-4": ("llama", {"attention_bias": True, "mlp_bias": True}, 4),
    "mistral-window-4": ("mistral", {"num_key_value_heads": 4, "sliding_window": 24}, 4),
    "qwen2-mqa-2": ("qwen2", {"num_key_value_heads": 1}, 2),
    "qwen3-2": ("qwen3", {"attention_bias": True}, 2),
    "gemma3-mqa-2": ("gemma3", {"num_key_value_heads": 1, "sliding_window": 20}, 2),
    "gpt-oss-2": ("gpt_oss", {"sliding_window": 20}, 2),
    "mixtral-2": ("mixtral", {}, 2),
    "qwen2-moe-4": ("qwen2_moe", {"decoder_sparse_step": 2}, 4),
    "granite-4": ("granite", {"residual_multiplier": 0.83, "attention_multiplier": 0.3, "embedding_multiplier": 2}, 4),
    "phi3-fused-2": ("phi3", {"partial_rotary_factor": 0.75}, 2),
    "opt-4": ("opt", {}, 4),
    "opt-norm-after-projected-2": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 40}, 2),
}
T = TypeVar("T")


class Ranks:
    """The runners of all ranks of a model in float32."""

    def __init__(self, directory: Path, size: int) -> None:
        self.configs = [config_of(directory).shard(rank, size) for rank in range(size)]
        self._meeting = Meeting(size)
        self._threads = ThreadPoolExecutor(size)
        self.runners = [self._runner(directory, rank) for rank in range(size)]

    def do(self, act: Callable[[int], T]) -> list[T]:
        """Runs it on every rank at once, with the rank's number."""

        def guarded(rank: int) -> T:
            try:
                return act(rank)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        return list(self._threads.map(guarded, range(len(self.runners))))

    def _runner(self, directory: Path, rank: int) -> TorchRunner:
        config, ranks = self.configs[rank], ThreadRanks(self._meeting, rank)
        with open_tensors(directory, config, torch.device("cpu")) as tensors:
            weights = load_weights(tensors, config, torch.float32)
        return TorchRunner(config, weights, NUM_BLOCKS, BLOCK_SIZE, fused=False, place=Place(ranks=ranks))


def config_of(directory: Path) -> ModelConfig:
    return parse_model_config(open_model(directory).config())


def whole_runner(directory: Path) -> TorchRunner:
    config = config_of(directory)
    with open_tensors(directory, config, torch.device("cpu")) as tensors:
        weights = load_weights(tensors, config, torch.float32)
    return TorchRunner(config, weights, NUM_BLOCKS, BLOCK_SIZE, fused=False)


def rows_of(prompts: list[list[int]], num_slices: int) -> list[Row]:
    """Each with blocks enough, scattered over the pool."""
    free = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
    blocks = free.reshape(len(prompts), num_slices, -1) if num_slices > 1 else free.reshape(len(prompts), -1)
    return [
        Row(tokens=list(prompt), blocks=own, num_prompt=len(prompt))
        for prompt, own in zip(prompts, blocks, strict=True)
    ]


def run(runner: TorchRunner, rows: list[Row], num_tokens: int) -> list[Row]:
    """Runs them until each has so many tokens more than its prompt, prompts in chunks."""
    while active := [row for row in rows if len(row.generated) < num_tokens]:
        step(runner, active, chunk=19)
    return rows


def blocks_of(runner: TorchRunner) -> np.ndarray:
    return runner.kv_memory().array


def byte_range(whole: TorchRunner, config: ModelConfig) -> slice:
    """Where a rank's KV heads are in a whole block."""
    assert config.sharded is not None
    found = whole.layout.bytes_of(config.sharded.kv_heads)
    return slice(found.start, found.stop)


def as_tensor(runner: TorchRunner, blocks: np.ndarray) -> Tensor:
    return torch.from_numpy(blocks.copy()).view(torch.float32).view(runner.layout.shape(NUM_BLOCKS))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    family, options, size = MODELS[request.param]
    return write_checkpoint(tmp_path / "model", family, **options), size


@pytest.mark.few(3)
def test_ranks_compute_together_what_one_worker_computes(model: tuple[Path, int]) -> None:
    """The tokens of `transformers`, and the KV of one worker: each rank the heads that its byte range has."""
    directory, size = model
    reference, whole, ranks = Reference(directory), whole_runner(directory), Ranks(directory, size)
    prompts, num_slices = prompts_of([5, 40]), whole.layout.num_slices
    expected = [reference.tokens(prompt, NUM_TOKENS) for prompt in prompts]
    assert [row.generated for row in run(whole, rows_of(prompts, num_slices), NUM_TOKENS)] == expected
    for rows in ranks.do(lambda rank: run(ranks.runners[rank], rows_of(prompts, num_slices), NUM_TOKENS)):
        assert [row.generated for row in rows] == expected
    kv = as_tensor(whole, blocks_of(whole))
    for config, runner in zip(ranks.configs, ranks.runners, strict=True):
        assert config.sharded is not None
        cut = as_tensor(runner, blocks_of(whole)[:, byte_range(whole, config)])
        assert torch.equal(cut, kv[:, config.sharded.kv_heads.start : config.sharded.kv_heads.stop])
        assert torch.allclose(as_tensor(runner, blocks_of(runner)), cut, rtol=1e-3, atol=1e-4)
        assert cut.any()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", [*WAYS, "mxfp4"])
def test_ranks_of_a_quantized_checkpoint_have_its_numbers(way: str, tmp_path: Path) -> None:
    """Wherever their shares cut a group, a word or an order of inputs."""
    checkpoint, directory = tmp_path / "plain", tmp_path / "quantized"
    if way == "mxfp4":
        write_mxfp4(directory, write_checkpoint(checkpoint, "gpt_oss"))
    else:
        write_quantized(directory, write_checkpoint(checkpoint), WAYS[way])
    reference, whole, ranks = Reference(directory / "numbers"), whole_runner(directory), Ranks(directory, 2)
    prompts = prompts_of([5, 40])
    expected = [reference.tokens(prompt, NUM_TOKENS) for prompt in prompts]
    num_slices = whole.layout.num_slices
    assert [row.generated for row in run(whole, rows_of(prompts, num_slices), NUM_TOKENS)] == expected
    for rows in ranks.do(lambda rank: run(ranks.runners[rank], rows_of(prompts, num_slices), NUM_TOKENS)):
        assert [row.generated for row in rows] == expected


@pytest.mark.few(2)
def test_a_whole_workers_blocks_are_continued_by_ranks(model: tuple[Path, int]) -> None:
    directory, size = model
    whole, ranks, prompts = whole_runner(directory), Ranks(directory, size), prompts_of([5, 40])
    begun = run(whole, rows_of(prompts, whole.layout.num_slices), 1)
    for config, runner in zip(ranks.configs, ranks.runners, strict=True):
        blocks_of(runner)[:] = blocks_of(whole)[:, byte_range(whole, config)]
    expected = [Reference(directory).tokens(prompt, NUM_TOKENS) for prompt in prompts]
    for rows in ranks.do(lambda rank: run(ranks.runners[rank], deepcopy(begun), NUM_TOKENS)):
        assert [row.generated for row in rows] == expected


@pytest.mark.few(2)
def test_the_blocks_of_ranks_are_continued_by_a_whole_worker(model: tuple[Path, int]) -> None:
    """They cover its blocks: it starts with others' numbers in them."""
    directory, size = model
    whole, ranks, prompts = whole_runner(directory), Ranks(directory, size), prompts_of([5, 40])
    num_slices = whole.layout.num_slices
    begun = ranks.do(lambda rank: run(ranks.runners[rank], rows_of(prompts, num_slices), 1))[0]
    as_numbers = blocks_of(whole).view(np.float32)
    as_numbers[:] = np.nan
    for config, runner in zip(ranks.configs, ranks.runners, strict=True):
        blocks_of(whole)[:, byte_range(whole, config)] = blocks_of(runner)
    assert not np.isnan(as_numbers).any()
    expected = [Reference(directory).tokens(prompt, NUM_TOKENS) for prompt in prompts]
    assert [row.generated for row in run(whole, begun, NUM_TOKENS)] == expected
