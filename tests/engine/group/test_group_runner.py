"""A model on several ranks, which are processes: what they compute together, and how they end together."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from services.config import Kernels, KvCacheDtype, LogFormat
from services.config.engine import EngineConfig
from services.engine.expert_imbalance import pairs_of_ranks
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.base import Runner, SamplingBatch, ScoredTokens, StepInput, StepOutput, StepTokens
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.group.rank_config import RankConfig
from services.engine.runner.group.rank_processes import RankProcesses
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.load import LoadedModel, load_runner
from services.protocol.model_files.base import ModelError
from tests.checkpoints import write_checkpoint
from tests.forkserver import FORKSERVER

_BLOCKS = 15  # of the sequence
_PROMPT, _FIRST = 190, 161  # tokens of a prompt, and those of its first chunk, which stages cut into two pieces
_LONG_S = 60.0
_SOON_S = 10.0  # on a loaded machine; the watch looks five times a second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads, so that two ranks have different numbers of them."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(
        directory, "llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96, num_hidden_layers=2
    )
    return directory


def engine_of(model: Path, **changes: Any) -> EngineConfig:
    engine = EngineConfig(
        model=model, kv_memory_bytes=8 << 20, max_num_batched_tokens=256, max_model_len=256, num_threads=2
    )
    return replace(engine, **changes)


@contextmanager
def loaded(engine: EngineConfig) -> Iterator[LoadedModel]:
    model = load_runner(engine)
    try:
        yield model
    finally:
        if isinstance(model.runner, GroupRunner):
            model.runner.close()


def a_step(ids: np.ndarray, start: int, scored: ScoredTokens | None = None, num_slices: int = 1) -> StepInput:
    end = start + len(ids)
    tokens = StepTokens(
        ids.astype(np.int32),
        np.arange(start, end, dtype=np.int32),
        np.array([0, len(ids)], dtype=np.int32),
        np.array([end], dtype=np.int32),
        np.arange(_BLOCKS * num_slices, dtype=np.int32)[None],
    )
    return StepInput.of(tokens, np.array([len(ids) - 1]), SamplingBatch.greedy(1, num_logprobs=3), scored)


def run(runner: Runner, step: StepInput) -> StepOutput:
    runner.launch(step)
    return runner.collect()


def numbers_of(runner: Runner, vocab_size: int) -> tuple[list[int], np.ndarray]:
    """The tokens that follow a prompt, which is computed in two chunks and scored, and all log-probabilities."""
    prompt = np.random.default_rng(0).integers(0, vocab_size, _PROMPT).astype(np.int32)
    found, tokens = [], []
    for start, end in ((0, _FIRST), (_FIRST, _PROMPT)):
        queries = np.arange(0, end - start - 1, 3)
        scored = ScoredTokens(queries, prompt[start + queries + 1], np.full(len(queries), 2, dtype=np.int32))
        output = run(runner, a_step(prompt[start:end], start, scored, runner.layout.num_slices))
        assert output.logprobs is not None
        assert output.scored is not None
        found += [output.scored.sampled, output.scored.top.ravel()]
    for position in range(_PROMPT, _PROMPT + 30):
        tokens.append(int(output.token_ids[0]))
        output = run(runner, a_step(output.token_ids, position, num_slices=runner.layout.num_slices))
        assert output.logprobs is not None
        found.append(output.logprobs.top.ravel())
    return tokens, np.concatenate(found)


def kv_of(runner: Runner) -> np.ndarray:
    """The numbers in the sequence's blocks; none of those in codes, which may differ by one."""
    memory, used = runner.kv_memory(), np.arange(_BLOCKS * runner.layout.num_slices, dtype=np.uint32)
    found = np.frombuffer(memory.read(used, 0, len(used) * memory.block_bytes), dtype=np.uint8)
    return found.view(np.float32) if runner.layout.dtype == "float32" else found[:0]


def assert_the_same(engine: EngineConfig, ranks: int, stages: int = 1, within: float = 1e-4) -> None:
    with loaded(replace(engine, tensor_parallel_size=1, expert_parallel=False)) as one:
        expected, kv = numbers_of(one.runner, one.vocab_size), kv_of(one.runner)
    with loaded(replace(engine, tensor_parallel_size=ranks, pipeline_parallel_size=stages)) as several:
        assert several.fingerprint == one.fingerprint, "KV of both may be exchanged"
        assert several.runner.layout == one.runner.layout
        tokens, numbers = numbers_of(several.runner, several.vocab_size)
        assert tokens == expected[0]
        assert numbers == pytest.approx(expected[1], abs=within)
        assert kv_of(several.runner) == pytest.approx(kv, abs=within), "each head of each layer is where it belongs"
        memory = several.runner.kv_memory()
        free = _BLOCKS * several.runner.layout.num_slices
        several.runner.copy_block(0, free)
        first, copied = (memory.read(np.array([block], np.uint32), 0, memory.block_bytes) for block in (0, free))
        assert first == copied
        assert any(first)


def test_two_ranks_compute_what_one_process_does(model: Path) -> None:
    assert_the_same(engine_of(model), 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (3, {}),
        (4, {}),
        (2, {"kernels": Kernels.TORCH}),
        (3, {"kv_cache_dtype": KvCacheDtype.INT8}),
        (2, {"num_threads": 4}),
        (2, {"num_threads": 1}),
    ],
)
def test_more_ranks_and_other_ways_compute_what_one_process_does(
    model: Path, ranks: int, changes: dict[str, Any]
) -> None:
    assert_the_same(engine_of(model, **changes), ranks)


def test_two_stages_compute_what_one_process_does(model: Path) -> None:
    assert_the_same(engine_of(model), 1, stages=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "stages", "family", "shape", "changes"),
    [
        (2, 2, "llama", {}, {}),
        (2, 2, "gemma2", {"sliding_window": 20, "num_hidden_layers": 4}, {}),
        (1, 3, "gpt_oss", {"sliding_window": 20, "num_hidden_layers": 5}, {}),
        (2, 2, "deepseek_v3", {}, {}),
        (2, 2, "qwen3_moe", {}, {"expert_parallel": True}),
        (1, 2, "llama", {}, {"kernels": Kernels.TORCH}),
        (2, 2, "llama", {}, {"kernels": Kernels.TORCH}),
        (1, 2, "gemma2", {"sliding_window": 20}, {"kv_cache_dtype": KvCacheDtype.INT8}),
        (2, 2, "llama", {}, {"kv_cache_dtype": KvCacheDtype.INT8}),
        (1, 2, "llama", {}, {"num_threads": 4}),
    ],
)
def test_more_stages_of_ranks_and_other_ways_compute_what_one_process_does(
    ranks: int, stages: int, family: str, shape: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    assert_the_same(engine_of(directory, **changes), ranks, stages)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "ranks", "stages"), [("mixtral", 2, 1), ("qwen2_moe", 3, 1), ("deepseek_v3", 2, 1), ("mixtral", 2, 2)]
)
@pytest.mark.parametrize("kernels", list(Kernels))
def test_ranks_with_whole_experts_compute_what_one_process_does(
    family: str, ranks: int, stages: int, kernels: Kernels, tmp_path: Path
) -> None:
    """Of stages, the last one's ranks count the pairs of their layers."""
    directory = write_checkpoint(tmp_path / "model", family)
    engine = engine_of(directory, kernels=kernels)
    step = a_step(np.arange(40), 0)
    step.counts_experts = True
    with loaded(engine) as one:
        expected = numbers_of(one.runner, one.vocab_size)
        counts = run(one.runner, step).expert_pairs
        assert one.runner.experts_of_ranks == ()
    engine = replace(engine, tensor_parallel_size=ranks, pipeline_parallel_size=stages, expert_parallel=True)
    with loaded(engine) as several:
        assert several.fingerprint == one.fingerprint, "KV of both may be exchanged"
        tokens, numbers = numbers_of(several.runner, several.vocab_size)
        assert tokens == expected[0]
        assert numbers == pytest.approx(expected[1], abs=1e-4)
        own = several.runner.experts_of_ranks
        pairs = run(several.runner, step).expert_pairs
        assert pairs is not None
        assert counts is not None
        if stages == 1 or kernels is Kernels.TORCH:
            assert pairs.tolist() == counts[-len(pairs) :].tolist(), "whichever rank has an expert"
        else:  # one process leaves tokens out of its last layer; pieces are too short for that to pay with kernels
            assert [layer.sum() for layer in pairs] == [counts[0].sum()]
        assert len(pairs) * stages == len(counts)
        assert len(own) == ranks
        assert pairs_of_ranks(pairs, own).sum() == pairs.sum() > 0


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The ranks that a process has started, among its other children."""
    return [child for child in process.children() if "services.engine.runner.group.rank_main" in child.cmdline()]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kernels", list(Kernels))
@pytest.mark.parametrize("of_ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_lost_rank_ends_the_step_and_is_told_in_words(
    model: Path, how: signal.Signals, kernels: Kernels, of_ranks: dict[str, int]
) -> None:
    told, heard = [], threading.Event()

    def tell(reason: str) -> None:
        told.append(reason)
        heard.set()

    with loaded(engine_of(model, **of_ranks, kernels=kernels)) as group:
        assert group.group is not None
        group.group.when_lost(tell)
        run(group.runner, a_step(np.arange(40), 0))
        (rank,) = ranks_of(psutil.Process())
        os.kill(rank.pid, how)
        with pytest.raises(
            RankLostError, match="rank 1 ended: signal 9" if how is signal.SIGKILL else "rank 1 is stop"
        ):
            run(group.runner, a_step(np.arange(40), 0))
        assert heard.wait(_SOON_S)
        assert len(told) == 1
    assert not rank.is_running()


@pytest.mark.long
def test_a_rank_leaves_signals_that_end_workers_to_rank_0(model: Path) -> None:
    with loaded(engine_of(model, tensor_parallel_size=2)) as group:
        (rank,) = ranks_of(psutil.Process())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(rank.pid, number)
            run(group.runner, a_step(np.arange(40), 0))
    assert not rank.is_running()


@pytest.mark.long
def test_ranks_end_with_rank_0_however_that_ends(model: Path) -> None:
    ours, theirs = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_load_and_wait, args=(engine_of(model, tensor_parallel_size=3), theirs))
    process.start()
    assert ours.poll(_LONG_S)
    ranks = [psutil.Process(pid) for pid in ours.recv()]
    assert len(ranks) == 2
    process.kill()
    process.join(_LONG_S)
    _, left = psutil.wait_procs(ranks, _SOON_S)
    assert not left


def _load_and_wait(engine: EngineConfig, pipe: Connection) -> None:
    load_runner(engine)
    pipe.send([rank.pid for rank in ranks_of(psutil.Process())])
    threading.Event().wait()


def test_what_ranks_cannot_share_is_refused_before_any_starts(model: Path) -> None:
    with pytest.raises(ModelError, match="7 ranks cannot share 6 attention heads"):
        load_runner(engine_of(model, tensor_parallel_size=7))
    with pytest.raises(ModelError, match="3 stages cannot share 2 layers"):
        load_runner(engine_of(model, pipeline_parallel_size=3))
    assert not ranks_of(psutil.Process()), "no rank was started"


@pytest.mark.long
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    memory = SharedPages.create("of nothing", 4096).file
    engine = EngineConfig(model=tmp_path / "nothing", tensor_parallel_size=2)
    config = RankConfig(
        engine=engine,
        log_format=LogFormat.TEXT,
        rank=1,
        num_blocks=2,
        pool=memory,
        steps=memory,
        sums=memory,
        store=None,
        hidden=None,
    )
    ranks = RankProcesses([config])
    with pytest.raises(ModelError, match=r"^rank 1: .*nothing"):
        ranks.answers()
