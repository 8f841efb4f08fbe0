"""`Ranks` whose members are threads of one process, for tests: plain sums, which wait for each other at a barrier."""

from threading import Barrier

import torch
from torch import Tensor

from services.engine.kernels.base import BlockSizes
from services.engine.kernels.ranks import part_of

LONGEST_WAIT_S = 300.0  # a rank that fails ends the others' waits at once


class Meeting:
    """What the ranks of one model share."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=LONGEST_WAIT_S)
        self.parts: list[Tensor] = [torch.empty(0)] * size


class ThreadRanks:
    """`Ranks` of one thread. Every rank gets what only rank 0 needs, so that each can sample."""

    is_kernel = False
    blocks: BlockSizes | None = None
    waited_s = 0.0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(dim=0)

    def gather(self, part: Tensor, width: int) -> Tensor:
        parts = self._all(part)
        assert [one.shape[1] for one in parts] == [len(part_of(rank, self.size, width)) for rank in range(self.size)]
        return torch.cat(parts, dim=1)

    def begin_step(self, number: int) -> None:
        pass

    def end_step(self) -> None:
        pass

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def check(self) -> None:
        pass

    def _all(self, part: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait()
        parts = list(meeting.parts)
        meeting.barrier.wait()
        return parts
