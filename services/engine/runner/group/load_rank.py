"""Loads the part of a model that a rank above 0 has."""

from dataclasses import dataclass

from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.ranks import Ranks
from services.engine.runner.cpu.load import load_cpu
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.group.cores import GroupCores
from services.engine.runner.group.links import StepReader
from services.engine.runner.group.meeting import Meeting
from services.engine.runner.group.rank_config import RankAnswer, RankConfig
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.group.stages import join_stage
from services.engine.runner.group.step_ring import StepRing
from services.engine.runner.load_plan import plan_load
from services.engine.runner.progress import Untold


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """A rank that has loaded."""

    runner: TorchRunner
    steps: StepReader
    ranks: Ranks
    cores: GroupCores
    answer: RankAnswer


def load_rank(config: RankConfig) -> Rank:
    """Loads what the configuration says. Raises ModelError."""
    openmp = loaded_openmp()
    assert openmp is not None, "rank 0 has it, so this process has it, too"
    whole = plan_load(config.engine)
    plan, (_, rank_of_stage) = whole.shard(config.rank), whole.stage_of(config.rank)
    cores = GroupCores(openmp)
    ranks = Meeting(config.engine.tensor_parallel_size, config.sums, config.store).join(rank_of_stage)
    stage = join_stage(whole, config.rank, None if config.hidden is None else SharedPages(config.hidden), ranks)
    pool = SharedPages(config.pool).array[: plan.pool_bytes(config.num_blocks)]
    loaded = load_cpu(plan, Place(cores, ranks, pool, stage), Untold(), config.num_blocks)
    answer = RankAnswer(
        weight_bytes=loaded.weights.num_bytes, not_shared=loaded.weights.not_shared, notices=loaded.notices
    )
    ring = StepRing(SharedPages(config.steps), config.rank - 1)
    return Rank(loaded.runner, ring, ranks, cores, answer)
