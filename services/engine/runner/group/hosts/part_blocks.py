"""The blocks of a rank that is a host: its part of those of the whole model, for whoever hands them over."""

import numpy as np

from kvtransfer.block_memory import GroupBlocks
from services.engine.runner.load_plan import LoadPlan


def part_blocks(plan: LoadPlan, shard: LoadPlan, pool: np.ndarray, num_blocks: int) -> GroupBlocks:
    """Returns the blocks that lie in a rank's pool, uint8[bytes]. plan: of the whole model. shard: of the rank."""
    assert shard.config.sharded is not None
    ranges = plan.layout.ranges_of(shard.config.sharded.kv_heads)
    own = pool[: num_blocks * shard.layout.block_bytes].reshape(num_blocks, -1)
    return GroupBlocks([own], [ranges], plan.layout.block_bytes)
