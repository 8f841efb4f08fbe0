"""The experts of a layer as ranks have them that share out whole experts."""

from services.engine.kernels.ranks import part_of
from services.engine.models.experts_config import Experts, RankExperts


def experts_of_ranks(experts: Experts, size: int) -> list[RankExperts]:
    """Returns each rank's. Columns of an expert that every token takes stay whole."""
    return [experts.divide(size, part_of(rank, size, experts.num_experts), range) for rank in range(size)]
