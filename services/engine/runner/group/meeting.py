"""The way in which the ranks of a stage on one host meet: by memory that kernels add up in, or by Gloo without them."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import FileStore

from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.load import why_not_fused
from services.engine.kernels.ranks import RankLostError, Ranks, SoleRank
from services.engine.runner.base import CHECK_TOKENS
from services.engine.runner.load_plan import LoadPlan, dtype_name
from services.protocol.model_files.base import ModelError

_GROUP = "baton"
_PATIENCE_S = 600.0  # of Gloo: ranks that end are noticed by who watches them


@dataclass(frozen=True, slots=True)
class Meeting:
    """The means by which a rank meets the others of its stage."""

    size: int  # of the stage; 1: there is nobody to meet
    memory: int | None  # descriptor of what `SharedRanks` share; None: ranks meet by Gloo
    store: Path | None  # the file by which Gloo's ranks find each other

    @classmethod
    def create(cls, plan: LoadPlan) -> "Meeting":
        """Makes what all ranks of one stage of a plan need; rank 0 does. Raises OSError."""
        engine, config, size = plan.engine, plan.config, plan.engine.tensor_parallel_size
        if size == 1:
            return cls(size, None, None)
        if engine.kernels != "auto" or why_not_fused(dtype_name(plan.dtype)) is not None:
            return cls(size, None, Path(tempfile.mkdtemp(prefix="baton-ranks-")) / "store")
        from services.engine.kernels.cpu.shared_ranks import RankSizes, SharedRanks  # numba may not be there

        threads = max(1, (engine.num_threads or len(os.sched_getaffinity(0))) // engine.num_ranks)
        rows = max(engine.max_num_batched_tokens, engine.max_num_seqs, CHECK_TOKENS)
        sizes = RankSizes(size, rows, config.hidden_size, config.vocab_size, plan.dtype.itemsize, threads)
        return cls(size, SharedRanks.create(sizes).fd, None)

    def join(self, rank: int) -> Ranks:
        """Meets the other ranks, as the one with this number in its stage. By Gloo it waits for them. Raises
        ModelError.
        """
        if self.size == 1:
            return SoleRank()
        if self.memory is not None:
            from services.engine.kernels.cpu.shared_ranks import SharedRanks

            return SharedRanks.join(self.memory, rank)
        assert self.store is not None
        try:
            return GlooRanks(FileStore(str(self.store), self.size), _GROUP, rank, self.size, _PATIENCE_S)
        except RankLostError as error:
            raise ModelError(f"rank {rank} does not find the others: {error}") from error

    def end(self) -> None:
        """Removes what the ranks met by, once they have."""
        if self.store is not None:
            self.store.unlink(missing_ok=True)
            self.store.parent.rmdir()
