"""The place where a runner computes: its share of the cores, the memory of its pool, and the other ranks."""

from dataclasses import dataclass

import numpy as np

from services.engine.kernels.ranks import Ranks
from services.engine.models.model_config import ModelConfig
from services.engine.runner.cpu.cores import StepCores


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A runner's part of the process that it is in."""

    cores: StepCores | None = None  # None: it leaves torch's number of threads as it is
    ranks: Ranks | None = None  # those of `Makers.ranks`; None: the model is whole
    pool: np.ndarray | None = None  # uint8, zeroed, of the runner's blocks and spare blocks; None: it allocates them

    @property
    def block_threads(self) -> int | None:
        """Returns for how many threads rows are cut into blocks; None: for those that run."""
        return None if self.ranks is None else self.ranks.block_threads

    def check(self, config: ModelConfig) -> None:
        """Checks that the configuration is that of this rank, or of a whole model."""
        sharded, ranks = config.sharded, self.ranks
        assert (sharded is None) == (ranks is None), "a rank's runner needs the other ranks, and no other one has any"
        if sharded is not None and ranks is not None:
            assert (sharded.rank, sharded.size) == (ranks.rank, ranks.size)
