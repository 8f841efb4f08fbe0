"""The room that a host has for its rank, and what all ranks make of it."""

import os
from collections.abc import Sequence

from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.load import why_not_fused
from services.engine.runner.cpu.load import weight_bytes
from services.engine.runner.group.hosts.host_messages import Room
from services.engine.runner.load_plan import LoadPlan, dtype_name
from services.engine.runner.memory import check_fits, kv_budget


def kernels_of(plan: LoadPlan) -> str:
    """Returns the class of processors for which kernels are compiled here, or `torch`: ranks have the same, or they
    would round differently, and send a token to different experts.
    """
    fused = plan.engine.kernels == "auto" and why_not_fused(dtype_name(plan.dtype)) is None
    return known_isa().name if fused else "torch"


def room_of(plan: LoadPlan, shard: LoadPlan) -> Room:
    """Returns the room on this host for one rank of a plan. Raises ModelError."""
    threads = plan.engine.num_threads or len(os.sched_getaffinity(0))
    if plan.engine.kv_memory_bytes is not None:
        check_fits(weight_bytes(shard), "this rank's part of the weights")
        return Room(num_blocks=None, threads=threads)
    return Room(num_blocks=shard.num_blocks(kv_budget(None, weight_bytes(shard))), threads=threads)


def blocks_of(plan: LoadPlan, rooms: Sequence[Room]) -> int:
    """Returns the blocks, or slices, for which each rank has room. Raises ModelError if these are too few."""
    found = [room.num_blocks for room in rooms if room.num_blocks is not None]
    if plan.engine.kv_memory_bytes is None:
        return min(found)
    shards = [plan.shard(rank) for rank in range(len(rooms))]
    of_block = sum(shard.layout.block_bytes for shard in shards)  # more than the model's, where ranks have a head twice
    return plan.num_blocks(plan.engine.kv_memory_bytes * plan.layout.block_bytes // of_block)
