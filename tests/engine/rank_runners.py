"""Runners of all ranks of a model, in processes: rank 0 leads steps, and the others follow, over a socket."""

import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import FileStore

from services.engine.kernels.cpu.shared_ranks import SharedRanks
from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.ranks import Ranks
from services.engine.models.architectures import parse_model_config
from services.engine.models.base import Weights
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.base import PooledTokens, SamplingBatch, ScoredTokens, StepInput, StepOutput, StepTokens
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.shared_weights import share_weights
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.cpu.weight_holders import WeightHolders
from services.protocol.model_files.open import open_model
from tests.engine.sharing import Told
from tests.engine.stepping import Row, run_greedy

NUM_BLOCKS, BLOCK_SIZE = 160, 16
LONGEST_WAIT_S = 60.0
T = TypeVar("T")
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def config_of(directory: Path) -> ModelConfig:
    return parse_model_config(open_model(directory).config())


def runner_of(
    directory: Path,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    fused: bool = True,
    holders: Path | None = None,
    expert_parallel: bool = False,
) -> TorchRunner:
    """holders: weights are shared with those of this directory; None: they are the process's own."""
    config = config_of(directory).shard(ranks.rank, ranks.size, expert_parallel=expert_parallel)

    def read() -> Weights:
        with open_tensors(directory, config, torch.device("cpu")) as tensors:
            return load_weights(tensors, config, dtype, fused=fused)

    if holders is None:
        weights = read()
    else:
        weights = share_weights(f"rank {ranks.rank}", read, Told(), WeightHolders(holders)).weights
    return TorchRunner(config, weights, NUM_BLOCKS, BLOCK_SIZE, fused=fused, place=Place(ranks=ranks))


class LeadingRunner:
    """Rank 0's runner, which tells the other ranks of each step."""

    def __init__(self, runner: TorchRunner, ranks: Ranks, others: list[Connection]) -> None:
        self._runner, self._ranks, self._others = runner, ranks, others
        self._number = 0
        self.layout, self.num_blocks = runner.layout, runner.num_blocks

    def launch(self, step: StepInput) -> None:
        self._number += 1
        for other in self._others:
            other.send((self._number, step.tokens.to_bytes(), step.parts, step.samples_all))
        self._ranks.begin_step(self._number)
        self._runner.launch(step)
        self._ranks.end_step()

    def collect(self) -> StepOutput:
        return self._runner.collect()


def follow(runner: TorchRunner, ranks: Ranks, leader: Connection) -> None:
    """Follows steps until the leader closes the connection."""
    while True:
        try:
            number, tokens, parts, samples_all = leader.recv()
        except EOFError:
            return
        ranks.begin_step(number)
        runner.follow(StepTokens.from_bytes(tokens), parts, samples_all=samples_all)
        ranks.end_step()


def generate(
    own: SharedRanks,
    directory: Path,
    address: str,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk: int = 13,
    fused: bool = True,
    by_gloo: bool = False,
    holders: Path | None = None,
    expert_parallel: bool = False,
) -> list[Row] | None:
    """Runs greedy continuations on all ranks, each in its own process. Returns rank 0's rows."""
    torch.set_num_threads(own.sizes.threads)
    ranks: Ranks = own
    if by_gloo:
        ranks = GlooRanks(FileStore(f"{address}.store", own.size), "ranks", own.rank, own.size, 60.0)
    dtype = DTYPES[own.sizes.item_bytes]
    runner = runner_of(directory, ranks, dtype, fused=fused, holders=holders, expert_parallel=expert_parallel)

    def run(leading: Any) -> list[Row]:
        return run_greedy(leading, prompts, num_tokens, chunk=chunk, num_logprobs=4)

    return lead(runner, ranks, address, run)


def score(ranks: SharedRanks, directory: Path, address: str, prompt: list[int]) -> np.ndarray | None:
    """Returns the log-probability of each token of a prompt but the first, by one step of all ranks."""
    torch.set_num_threads(1)
    runner, last = runner_of(directory, ranks, torch.float32), len(prompt) - 1
    tokens = StepTokens(
        token_ids=np.array(prompt, np.int32),
        positions=np.arange(len(prompt), dtype=np.int32),
        query_starts=np.array([0, len(prompt)], np.int32),
        seq_lens=np.array([len(prompt)], np.int32),
        block_tables=np.arange(-(-len(prompt) // BLOCK_SIZE), dtype=np.int32)[None],
    )
    scored = ScoredTokens(np.arange(last), np.array(prompt[1:], np.int32), np.zeros(last, np.int32))
    pooled = PooledTokens(np.arange(2), np.array([0, 2]))
    step = StepInput.of(tokens, np.array([last]), SamplingBatch.greedy(1), scored, pooled)

    def launch(leading: LeadingRunner) -> np.ndarray:
        leading.launch(step)
        logprobs = leading.collect().scored
        assert logprobs is not None
        return logprobs.sampled

    return lead(runner, ranks, address, launch)


def lead(runner: TorchRunner, ranks: Ranks, address: str, act: Callable[[LeadingRunner], T]) -> T | None:
    """Returns what rank 0 does with its runner, whose steps the others follow. Rank n is told of them at
    `{address}.{n}`.
    """
    if ranks.rank:
        with _connected(f"{address}.{ranks.rank}") as leader:
            follow(runner, ranks, leader)
        return None
    listeners = [Listener(f"{address}.{rank}") for rank in range(1, ranks.size)]
    others = [listener.accept() for listener in listeners]
    result = act(LeadingRunner(runner, ranks, others))
    for other, listener in zip(others, listeners, strict=True):
        other.close()
        listener.close()
    return result


def _connected(address: str) -> Connection:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):  # the leader does not listen yet
            assert time.monotonic() < deadline, "the leader does not listen"
            time.sleep(0.001)
