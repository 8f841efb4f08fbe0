"""The memory by which the stages of a group hand on hidden states: one piece of it for each rank of a stage, which the
ranks with the same number in other stages share.

    two stages of two ranks      rank 3 ─▶ rank 1        rank 2 ─▶ rank 0
"""

from services.engine.kernels.ranks import Ranks
from services.engine.runner.base import CHECK_TOKENS
from services.engine.runner.cpu.stage import Stage, memory_bytes
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.load_plan import LoadPlan


def create_hidden(plan: LoadPlan) -> list[SharedPages | None]:
    """Makes the memory for each rank of a stage; None: there is one stage. Raises OSError."""
    engine, config = plan.engine, plan.config
    if plan.num_stages == 1:
        return [None] * engine.tensor_parallel_size
    max_tokens = max(engine.max_num_batched_tokens, engine.max_num_seqs, CHECK_TOKENS)
    num_bytes = memory_bytes(plan.num_stages, max_tokens, config.hidden_size, plan.dtype.itemsize)
    return [SharedPages.create("baton-hidden", num_bytes) for _ in range(engine.tensor_parallel_size)]


def join_stage(plan: LoadPlan, rank: int, hidden: SharedPages | None, ranks: Ranks) -> Stage | None:
    """Joins a rank of the worker with those that have the layers before its own, and after them. plan: of the whole
    model. hidden: the memory, None if there is one stage. ranks: of its stage.
    """
    if hidden is None:
        return None
    number, _ = plan.stage_of(rank)
    return Stage(hidden.array, number, plan.num_stages, plan.config.hidden_size, plan.dtype, ranks.check)
