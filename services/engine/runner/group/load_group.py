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
from services.engine.models.config import DecoderConfig
from services.engine.models.experts_config import RankExperts
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
from services.engine.runner.group.stages import create_hidden, join_stage
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
        raise ModelError(f"{_option(plan)} is for Linux on x86-64")
    openmp = loaded_openmp()
    if openmp is None or share is None:
        raise ModelError(f"{_option(plan)} needs GNU's OpenMP, or one that can stand in for it")
    shards = [plan.shard(rank) for rank in range(plan.engine.num_ranks)]
    num_blocks = _num_blocks(plan, shards)
    try:
        pools = _pools(plan, shards, num_blocks)
        ring = StepRing.create(len(shards) - 1, longest_step(plan, num_blocks))
        meetings = [Meeting.create(plan) for _ in range(plan.num_stages)]
        hidden = create_hidden(plan)
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
            sums=meetings[stage].memory,
            store=meetings[stage].store,
            hidden=None if (pages := hidden[rank_of_stage]) is None else pages.file,
        )
        for rank in range(1, len(shards))
        for stage, rank_of_stage in [plan.stage_of(rank)]
    ]
    processes: RankProcesses | None = None
    try:
        processes = RankProcesses(configs)
        cores, ranks = LeadingCores(openmp, share, len(shards)), meetings[0].join(0)
        stage_0 = join_stage(plan, 0, hidden[0], ranks)
        pool = pools[0].array[: shards[0].pool_bytes(num_blocks)]
        own = load_cpu(shards[0], Place(cores, ranks, pool, stage_0), progress, num_blocks)
        progress.stage("waiting for the other ranks")
        answers = processes.answers()
    except BaseException:
        if processes is not None:
            processes.close(0.0)
        raise
    finally:
        for meeting in meetings:
            meeting.end()
    links = GroupLinks(ring, ranks, processes, cores)
    blocks = _blocks(plan, shards, pools, num_blocks)
    runner = GroupRunner(own.runner, plan.layout, blocks, links, experts_of(shards[: plan.engine.tensor_parallel_size]))
    atexit.register(runner.close)
    notices = dict.fromkeys((*own.notices, *(notice for answer in answers for notice in answer.notices)))
    return LoadedGroup(runner, own.kernels, joined_weights(own.weights, answers), tuple(notices))


def _num_blocks(plan: LoadPlan, shards: Sequence[LoadPlan]) -> int:
    """Returns the blocks, or slices, for which all pools together have room. Raises ModelError if these are too few."""
    # More than the model's, where ranks have a head twice.
    of_block = sum(shard.layout.block_bytes for shard in _with_own_pools(plan, shards))
    reserved = 0 if plan.engine.kv_memory_bytes else sum(map(weight_bytes, shards))
    budget = kv_budget(plan.engine.kv_memory_bytes, reserved)
    return plan.num_blocks(budget * plan.layout.block_bytes // of_block)


def _option(plan: LoadPlan) -> str:
    return "--pipeline-parallel-size" if plan.num_stages > 1 else "--tensor-parallel-size"


def _with_own_pools(plan: LoadPlan, shards: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
    """Returns those of the ranks that have pools of their own; the others have those of stage 0."""
    return shards if plan.divides_pools else shards[: plan.engine.tensor_parallel_size]


def _pools(plan: LoadPlan, shards: Sequence[LoadPlan], num_blocks: int) -> list[SharedPages]:
    """Makes the pools. Returns that of each rank."""
    pools = [SharedPages.create("baton-kv", shard.pool_bytes(num_blocks)) for shard in _with_own_pools(plan, shards)]
    return [pools[rank % len(pools)] for rank in range(len(shards))]


def longest_step(plan: LoadPlan, num_blocks: int) -> int:
    """Returns the bytes of the longest message of a step, at most."""
    engine, slices = plan.engine, plan.layout.num_slices
    of_row = min(-(-plan.wanted_len // engine.block_size) * slices, num_blocks) + slices
    tokens = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    return longest_message(tokens, engine.max_num_seqs, of_row)


def _blocks(plan: LoadPlan, shards: Sequence[LoadPlan], pools: Sequence[SharedPages], num_blocks: int) -> GroupBlocks:
    """Returns the blocks of the whole model, which lie in the pools of the ranks."""
    own, ranges = _with_own_pools(plan, shards), []
    for shard in own:
        assert shard.config.sharded is not None
        layers = shard.config.stage.layers if plan.divides_pools else None
        ranges.append(plan.layout.ranges_of(shard.config.sharded.kv_heads, layers))
    blocks = [
        pool.array[: num_blocks * shard.layout.block_bytes].reshape(num_blocks, -1)
        for pool, shard in zip(pools, own, strict=False)
    ]
    return GroupBlocks(blocks, ranges)


def experts_of(shards: Sequence[LoadPlan]) -> tuple[range, ...]:
    """Returns the experts of each rank of a stage; none where ranks share the columns of all experts."""
    configs = [shard.config for shard in shards]
    return tuple(
        config.experts.own
        for config in configs
        if isinstance(config, DecoderConfig) and isinstance(config.experts, RankExperts)
    )


def joined_weights(own: LoadedWeights, answers: Sequence[RankAnswer]) -> LoadedWeights:
    """Returns the facts about the weights of rank 0 and the others together."""
    num_bytes = own.num_bytes + sum(answer.weight_bytes for answer in answers)
    reasons = [own.not_shared, *(answer.not_shared for answer in answers)]
    return LoadedWeights(num_bytes, next((reason for reason in reasons if reason is not None), None))
