"""Makes the runner of a group of ranks on one host: starts the other ranks, loads rank 0, and waits for all."""

import atexit
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from kvtransfer.block_memory import GroupBlocks
from services.config import LogFormat
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.runner.base import LoadedWeights
from services.engine.runner.cpu.cores import CoreShare
from services.engine.runner.cpu.load import load_cpu, weight_bytes
from services.engine.runner.cpu.place import Place
from services.engine.runner.group.cores import LeadingCores
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.group.links import GroupLinks
from services.engine.runner.group.meeting import Meeting
from services.engine.runner.group.messages import longest_message
from services.engine.runner.group.rank_config import RankAnswer, RankConfig
from services.engine.runner.group.rank_processes import RankProcesses
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.group.step_ring import StepRing
from services.engine.runner.load_plan import LoadPlan
from services.engine.runner.memory import kv_budget
from services.engine.runner.progress import Progress
from services.protocol.model_files.base import ModelError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedGroup:
    """The runner of a group, and what was decided for it."""

    runner: GroupRunner
    kernels: str
    weights: LoadedWeights  # of all ranks
    notices: tuple[str, ...]


def load_group(plan: LoadPlan, share: CoreShare | None, progress: Progress, log_format: LogFormat) -> LoadedGroup:
    """Loads the model of a plan on as many ranks as its configuration says. Raises ModelError."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ModelError("--tensor-parallel-size is for Linux on x86-64")
    openmp = loaded_openmp()
    if openmp is None or share is None:
        raise ModelError("--tensor-parallel-size needs GNU's OpenMP, or one that can stand in for it")
    shards = [plan.shard(rank) for rank in range(plan.engine.tensor_parallel_size)]
    num_blocks = _num_blocks(plan, shards)
    try:
        pools = [_pool(shard, num_blocks) for shard in shards]
        ring = StepRing.create(len(shards) - 1, _longest_message(plan, num_blocks))
        meeting = Meeting.create(plan)
    except OSError as error:
        raise ModelError(f"shared memory for {len(shards)} ranks: {error.strerror}") from error
    configs = [
        RankConfig(
            engine=plan.engine,
            log_format=log_format,
            rank=rank,
            num_blocks=num_blocks,
            pool=pools[rank].file,
            steps=ring.pages.file,
            sums=meeting.memory,
            store=meeting.store,
        )
        for rank in range(1, len(shards))
    ]
    processes: RankProcesses | None = None
    try:
        processes = RankProcesses(configs)
        cores, ranks = LeadingCores(openmp, share, len(shards)), meeting.join(0)
        pool = pools[0].array[: shards[0].pool_bytes(num_blocks)]
        own = load_cpu(shards[0], Place(cores, ranks, pool), progress, num_blocks)
        progress.stage("waiting for the other ranks")
        answers = processes.answers()
    except BaseException:
        if processes is not None:
            processes.close(0.0)
        raise
    finally:
        meeting.end()
    links = GroupLinks(ring, ranks, processes, cores)
    runner = GroupRunner(own.runner, plan.layout, _blocks(plan, shards, pools, num_blocks), links)
    atexit.register(runner.close)
    notices = dict.fromkeys((*own.notices, *(notice for answer in answers for notice in answer.notices)))
    return LoadedGroup(runner, own.kernels, _joined(own.weights, answers), tuple(notices))


def _num_blocks(plan: LoadPlan, shards: Sequence[LoadPlan]) -> int:
    """Returns the blocks, or slices, for which all pools together have room. Raises ModelError if these are too few."""
    of_block = sum(shard.layout.block_bytes for shard in shards)  # more than the model's, where ranks have a head twice
    reserved = 0 if plan.engine.kv_memory_bytes else sum(map(weight_bytes, shards))
    budget = kv_budget(plan.engine.kv_memory_bytes, reserved)
    return plan.num_blocks(budget * plan.layout.block_bytes // of_block)


def _pool(shard: LoadPlan, num_blocks: int) -> SharedPages:
    return SharedPages.create("baton-kv", shard.pool_bytes(num_blocks))


def _longest_message(plan: LoadPlan, num_blocks: int) -> int:
    engine, slices = plan.engine, plan.layout.num_slices
    of_row = min(-(-plan.wanted_len // engine.block_size) * slices, num_blocks) + slices
    tokens = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    return longest_message(tokens, engine.max_num_seqs, of_row)


def _blocks(plan: LoadPlan, shards: Sequence[LoadPlan], pools: Sequence[SharedPages], num_blocks: int) -> GroupBlocks:
    """Returns the blocks of the whole model, which lie in the pools of the ranks."""
    ranges = []
    for shard in shards:
        assert shard.config.sharded is not None
        ranges.append(plan.layout.ranges_of(shard.config.sharded.kv_heads))
    blocks = [
        pool.array[: num_blocks * shard.layout.block_bytes].reshape(num_blocks, -1)
        for pool, shard in zip(pools, shards, strict=True)
    ]
    return GroupBlocks(blocks, ranges)


def _joined(own: LoadedWeights, answers: Sequence[RankAnswer]) -> LoadedWeights:
    num_bytes = own.num_bytes + sum(answer.weight_bytes for answer in answers)
    reasons = [own.not_shared, *(answer.not_shared for answer in answers)]
    return LoadedWeights(num_bytes, next((reason for reason in reasons if reason is not None), None))
