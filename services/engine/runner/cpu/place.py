"""The place where a runner computes: its share of the cores, the memory of its pool, and the other ranks."""

from dataclasses import dataclass

import numpy as np

from services.engine.kernels.base import BlockSizes
from services.engine.kernels.ranks import Ranks
from services.engine.models.base import Weights
from services.engine.models.model_config import ModelConfig
from services.engine.runner.cpu.cores import StepCores
from services.engine.runner.cpu.stage import Stage


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A runner's part of the process that it is in."""

    cores: StepCores | None = None  # None: it leaves torch's number of threads as it is
    ranks: Ranks | None = None  # that share the layers that are here; None: nobody else has a part of these
    pool: np.ndarray | None = None  # uint8, zeroed, of the runner's blocks and spare blocks; None: it allocates them
    stage: Stage | None = None  # of a model whose layers are divided into stages; None: all of them are here

    @property
    def blocks(self) -> BlockSizes | None:
        """Returns the blocks into which rows are cut; None: those that suit the model and the threads that run."""
        return None if self.ranks is None else self.ranks.blocks

    def connect(self, config: ModelConfig, weights: Weights) -> None:
        """Connects the weights of a rank, which is this one, with the others."""
        has_all_layers = len(config.stage.layers) == config.whole.num_layers
        assert has_all_layers == (self.stage is None), "a stage's runner needs the other stages"
        if config.sharded is None or config.sharded.size == 1:
            assert self.ranks is None or self.ranks.size == 1, "each layer is whole"
            return
        assert self.ranks is not None, "a rank's runner needs the other ranks"
        assert (config.sharded.rank, config.sharded.size) == (self.ranks.rank, self.ranks.size)
        assert weights.ranks is not None
        weights.ranks.connect(self.ranks)
