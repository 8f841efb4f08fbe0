"""Stacks in which every request is handed off: Redis, a gateway, a prefill and two decode workers with little room."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtransfer.layout import KvLayout
from services.engine.models.architectures import parse_model_config
from services.engine.models.model_config import ModelConfig
from services.engine.runner.load_plan import kv_layout
from services.protocol.model_files.open import open_model
from tests.e2e.conftest import write_model
from tests.e2e.forced_shapes import SHAPES
from tests.e2e.stack import Gateway, Stack, worker_ports
from tests.redis_server import running_redis

TRANSPORTS = ("nixl", "grpc")
ROLES = ("prefill", "decode")
Ranks = tuple[int, int]
BLOCK, CHUNK = 16, 37  # tokens; of a block, and of the longest step
NUM_BLOCKS = 24  # of each worker


@dataclass(frozen=True)
class ForcedStack:
    """A running stack of one shape over one transport."""

    name: str  # of the shape
    transport: str
    stack: Stack
    config: ModelConfig
    layout: KvLayout

    @property
    def model(self) -> Path:
        """The checkpoint."""
        return self.stack.model

    @property
    def gateway(self) -> Gateway:
        """Where clients ask."""
        return self.stack.gateway

    @property
    def windows(self) -> list[int]:
        """The lengths of the windows of its layers, without those that see all."""
        of_layers = self.config.layer_windows
        found = of_layers if isinstance(of_layers, tuple) else (of_layers,)
        return sorted({window for window in found if window is not None})

    def fewest_slices(self, num_tokens: int) -> int:
        """Slices that a sequence of so many tokens needs to decode, at least; each worker has `NUM_BLOCKS` times those
        of a block.
        """
        num_blocks, groups = -(-num_tokens // BLOCK), self.layout.groups
        if groups is None:
            return num_blocks
        seen = [min(num_blocks, -(-window // BLOCK)) for window in groups.later_windows]
        return sum(size * blocks for size, blocks in zip(groups.sizes, [num_blocks, *seen], strict=True))


@dataclass(frozen=True)
class Division:
    """How workers divide their model."""

    ranks: Ranks = (1, 1)  # of each prefill worker, in each of its stages, and of each decode worker
    stages: int = 1  # of each prefill worker
    whole_experts: Collection[str] = ()  # the roles whose workers' ranks have whole experts

    def __str__(self) -> str:
        sides = [
            f"{number}{' with whole experts' if role in self.whole_experts else ''}"
            for role, number in zip(ROLES, self.ranks, strict=True)
        ]
        return f"{sides[0]}{f' in {self.stages}' if self.stages > 1 else ''}:{sides[1]}"


@contextlib.contextmanager
def forced_stack(
    name: str,
    transport: str,
    directory: Path,
    prepare: Callable[[], None] | None = None,
    prepare_gateway: Callable[[], None] | None = None,
    division: Division = Division(),
) -> Iterator[ForcedStack]:
    """The stack of a shape, which ends with the context. directory: an empty one. prepare, prepare_gateway: see
    `Stack`.
    """
    family, shape = SHAPES[name]
    model = write_model(directory / "model", family, **shape)
    config = parse_model_config(open_model(model).config())
    layout = kv_layout(config, BLOCK, torch.float32)
    options = ["--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK), "--transport", transport]
    with running_redis(directory) as redis:
        stack = Stack(
            model,
            worker_ports(1, 2),
            options,
            redis.url,
            kv_memory="",
            prepare=prepare,
            prepare_gateway=prepare_gateway,
            role_options={role: _sizes(config, layout, division, role) for role in ROLES},
        )
        with stack.running():
            yield ForcedStack(name, transport, stack, config, layout)


def _sizes(config: ModelConfig, layout: KvLayout, division: Division, role: str) -> list[str]:
    """The options for a role's ranks, and for their memory."""
    num_ranks = division.ranks[ROLES.index(role)]
    options = ["--tensor-parallel-size", str(num_ranks), "--kv-memory", _room(config, layout, num_ranks)]
    if role == "prefill":
        options += ["--pipeline-parallel-size", str(division.stages)]
    if role in division.whole_experts:
        options.append("--expert-parallel")
    return options


def _room(config: ModelConfig, layout: KvLayout, num_ranks: int) -> str:
    """The memory for `NUM_BLOCKS` blocks in the pools of so many ranks, several of which may have the same heads."""
    shards = [config.shard(rank, num_ranks).sharded for rank in range(num_ranks)]
    of_block = sum(layout.part(shard.kv_heads).block_bytes for shard in shards if shard is not None)
    return f"{math.ceil(NUM_BLOCKS * layout.num_slices * of_block / 1024)}KiB"
