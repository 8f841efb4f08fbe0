"""What the host does beside a GPU, on an emulated one where everything runs at the worst moment.

Some tests of the runner and of workers again, which elsewhere run where nothing is ever late; then what only a device
with a memory of its own has: loading, graphs, transports' copies.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadtest.gpu.bench_model import decode_step, prefill_step
from services.config import DeviceKind, KvCacheDtype, Quantization
from services.config.engine import EngineConfig
from services.engine.runner.load import LoadedModel, load_runner
from services.protocol.model_files.base import ModelError
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.gpu import test_device_blocks, test_gpu_runner, test_gpu_workers
from tests.gpu.emulated_cuda import TOTAL_BYTES, Card, Order, emulated_cuda
from tests.machine import NO_GPU, needs

pytestmark = needs(NO_GPU)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imported with its first model, which must not happen on the emulated device."""
    Reference(write_checkpoint(tmp_path_factory.mktemp("any") / "model"))


@pytest.fixture(params=Order)
def card(request: pytest.FixtureRequest, transformers: None) -> Iterator[Card]:
    """For tests of what runs when."""
    with emulated_cuda(request.param) as card:
        yield card


@pytest.fixture
def late_card(transformers: None) -> Iterator[Card]:
    """For tests of other things."""
    with emulated_cuda(Order.LATE) as card:
        yield card


@pytest.mark.long
def test_an_engine_one_step_ahead(card: Card, tmp_path: Path) -> None:
    test_gpu_runner.test_an_engine_one_step_ahead_generates_the_same(1, tmp_path)
    assert card.captures


@pytest.mark.long
def test_penalties_and_bans(late_card: Card, tmp_path: Path) -> None:
    test_gpu_runner.test_penalties_and_bans_see_every_token(1, tmp_path)


@pytest.mark.long
async def test_workers_with_a_pool_each(card: Card, tmp_path: Path) -> None:
    await test_gpu_workers.test_a_request_is_handed_from_one_pool_on_a_device_to_another(tmp_path)


@pytest.mark.parametrize("block_bytes", [7, (1 << 20) + 1])
def test_bytes_of_blocks(card: Card, block_bytes: int) -> None:
    test_device_blocks.test_pieces_of_blocks_are_read_and_written_and_nothing_else(block_bytes)


def test_a_copied_block_can_be_sent_at_once(card: Card, tmp_path: Path) -> None:
    runner = test_gpu_runner.make_runner(write_checkpoint(tmp_path / "model"))
    blocks, content = runner.kv_memory(), bytes(range(256)) * (runner.layout.block_bytes // 256)
    blocks.write(np.array([3], dtype=np.uint32), 0, content)
    runner.copy_block(3, 5)
    assert blocks.read(np.array([5], dtype=np.uint32), 0, len(content)) == content


def test_a_block_lands_in_a_pool_that_has_been_cleared(card: Card) -> None:
    test_device_blocks.test_a_pool_made_in_inference_mode_takes_blocks()


@pytest.mark.long
@pytest.mark.parametrize("fp8", [False, True])
def test_what_a_model_leaves_is_for_kv_and_its_steps_wait_for_nothing(
    late_card: Card, allow_trial_steps: Callable[[], None], fp8: bool, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16 if fp8 else torch.float32)
    options = {"kv_cache_dtype": KvCacheDtype.FP8, "quantization": Quantization.FP8} if fp8 else {}
    runner = load(directory, gpu_memory_fraction=0.02, **options).runner
    share = TOTAL_BYTES // 50
    assert 0.99 * share <= late_card.most_reserved <= share
    assert runner.kv_memory().device == 0
    allow_trial_steps()

    late_card.waits.clear()
    prompts = prompts_of([30, 5])
    rows = run_greedy(runner, prompts, 6, chunk=16)
    assert set(late_card.waits) == {"asleep"}
    if not fp8:
        reference = Reference(directory)
        assert [row.generated for row in rows] == [reference.tokens(prompt, 6) for prompt in prompts]


@pytest.mark.long
def test_the_host_waits_for_a_step_when_it_takes_its_results(
    late_card: Card, allow_trial_steps: Callable[[], None], tmp_path: Path
) -> None:
    """And then once, asleep; whatever it launches meanwhile."""
    loaded = load(write_checkpoint(tmp_path / "model"), kv_memory_bytes=1 << 20)
    runner = loaded.runner
    assert loaded.kernels == "cuda"
    allow_trial_steps()
    late_card.waits.clear()
    steps = [decode_step(2, 20), prefill_step(30)]
    for step in [*steps, *steps]:
        runner.launch(step)
        runner.launch(step)
        assert late_card.waits == []
        for _ in range(2):
            runner.collect()
            assert late_card.waits.pop() == "asleep"
            assert late_card.waits == []


@pytest.mark.long
def test_latents_and_experts_are_computed_as_elsewhere(
    card: Card, allow_trial_steps: Callable[[], None], tmp_path: Path
) -> None:
    """Both forms, in steps that wait for nothing; those that decode are replayed."""
    directory = write_checkpoint(tmp_path / "model", "deepseek_v2")
    runner = load(directory, kv_memory_bytes=1 << 20, max_num_batched_tokens=128).runner
    allow_trial_steps()
    card.waits.clear()
    prompts, reference = prompts_of([60, 5]), Reference(directory)
    rows = run_greedy(runner, prompts, 5, chunk=50)
    assert set(card.waits) == {"asleep"}
    assert card.captures
    assert [row.generated for row in rows] == [reference.tokens(prompt, 5) for prompt in prompts]


@pytest.mark.long
def test_a_model_that_does_not_fit_is_refused(
    late_card: Card, allow_trial_steps: Callable[[], None], tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model")
    with pytest.raises(ModelError, match=r"no memory is left for KV: this worker may take 0% of 0.25 GiB"):
        load(directory, gpu_memory_fraction=1e-6)
    with pytest.raises(ModelError, match=r"the KV pool needs 1.00 GiB, 0.25 GiB of 0.25 GiB are left"):
        load(directory, kv_memory_bytes=1 << 30)
    torch.cuda.empty_cache()
    occupied = torch.empty(late_card.free - 1024, dtype=torch.uint8, device="cuda")
    with pytest.raises(ModelError, match=r"the model's weights need 0.00 GiB, 0.00 GiB are free"):
        load(directory)
    del occupied
    allow_trial_steps()


def load(directory: Path, **options: Any) -> LoadedModel:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    return load_runner(EngineConfig(model=directory, device=DeviceKind.CUDA, **limits | options))
