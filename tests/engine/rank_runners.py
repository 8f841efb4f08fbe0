"""Runners of all ranks of a model, in processes: rank 0 leads steps, and the others follow, over a socket."""

from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from services.engine.kernels.cpu.shared_ranks import SharedRanks
from services.engine.kernels.ranks import Ranks
from services.engine.models.architectures import parse_model_config
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.base import StepInput, StepOutput, StepTokens
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.protocol.model_files.open import open_model
from tests.engine.stepping import Row, run_greedy

NUM_BLOCKS, BLOCK_SIZE = 160, 16
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def config_of(directory: Path) -> ModelConfig:
    return parse_model_config(open_model(directory).config())


def runner_of(directory: Path, ranks: Ranks, dtype: torch.dtype, *, fused: bool = True) -> TorchRunner:
    config = config_of(directory).shard(ranks.rank, ranks.size)
    with open_tensors(directory, config, torch.device("cpu")) as tensors:
        weights = load_weights(tensors, config, dtype, fused=fused)
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
    ranks: SharedRanks, directory: Path, address: str, prompts: list[list[int]], num_tokens: int, **options: Any
) -> list[Row] | None:
    """Runs greedy continuations on all ranks, each in its own process. Returns rank 0's rows. options: see `lead`."""
    threads = ranks.sizes.threads
    torch.set_num_threads(threads)
    runner = runner_of(directory, ranks, DTYPES[ranks.sizes.item_bytes], fused=options.pop("fused", True))
    return lead(runner, ranks, address, prompts, num_tokens, **options)


def lead(
    runner: TorchRunner, ranks: Ranks, address: str, prompts: list[list[int]], num_tokens: int, chunk: int = 13
) -> list[Row] | None:
    if ranks.rank:
        with _connected(f"{address}.{ranks.rank}") as leader:
            follow(runner, ranks, leader)
        return None
    listeners = [Listener(f"{address}.{rank}") for rank in range(1, ranks.size)]
    others = [listener.accept() for listener in listeners]
    leading: Any = LeadingRunner(runner, ranks, others)
    rows = run_greedy(leading, prompts, num_tokens, chunk=chunk, num_logprobs=4)
    for other, listener in zip(others, listeners, strict=True):
        other.close()
        listener.close()
    return rows


def _connected(address: str) -> Connection:
    while not Path(address).exists():
        pass
    return Client(address)
