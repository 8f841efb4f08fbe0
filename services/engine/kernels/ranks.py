"""The seam between a model of which each process has a part, a rank, and what adds up their results."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # configurations are read without torch
    from torch import Tensor

    from services.engine.kernels.base import BlockSizes


class RankLostError(Exception):
    """Another rank of the model has ended, or computes another step: one line. The results of this step are of no
    use, and this process can compute no further one with these ranks.
    """


class Ranks(Protocol):
    """One rank's way to all ranks of a model, from 0 to size - 1.

    All ranks make the same calls of `sum` and `gather` in the same order, with the same numbers of rows. A call waits
    for the other ranks until `abort`.
    """

    rank: int
    size: int
    is_kernel: bool  # `sum` and `gather` are kernels, which `Operations.replay` and `Operations.by_rows` may contain
    blocks: "BlockSizes | None"  # into which `Operations.by_rows` cuts rows; None: `is_kernel` is False

    def sum(self, x: "Tensor") -> "Tensor":
        """Returns the sum of what all ranks come with, [rows, width], in float32 in the order of the ranks and then
        rounded to x's dtype: the same to the bit on all of them. It may take the place of x.
        """

    def gather(self, part: "Tensor", width: int) -> "Tensor":
        """Returns the columns of all ranks beside each other, [rows, width], to rank 0; to others, what they came with.

        part: [rows, columns], the rank's columns of `part_of(rank, size, width)`.
        """

    def begin_step(self, number: int) -> None:
        """Begins the step with this number, which is larger than the one before, and the same on all ranks."""

    def end_step(self) -> None:
        """Ends a step. Raises RankLostError, as `check` does, if its sums are not those of all ranks."""

    def abort(self) -> None:
        """Ends all ranks' waits, from any thread, soon: what they return is of no use."""

    def check(self) -> None:
        """Raises RankLostError after `abort`, of whichever rank."""

    @property
    def waited_s(self) -> float:
        """Returns the seconds for which this rank has waited for others in `sum` and `gather` so far."""


class SoleRank:
    """`Ranks` of which there is one, whose group has other processes: it adds nothing up, and hears of their end."""

    rank, size, is_kernel = 0, 1, True

    def __init__(self) -> None:
        self.blocks: BlockSizes | None = None
        self._is_aborted = False

    def sum(self, x: "Tensor") -> "Tensor":
        """See `Ranks.sum`."""
        return x

    def gather(self, part: "Tensor", width: int) -> "Tensor":
        """See `Ranks.gather`."""
        return part

    def begin_step(self, number: int) -> None:
        """See `Ranks.begin_step`."""

    def end_step(self) -> None:
        """See `Ranks.end_step`."""
        self.check()

    def abort(self) -> None:
        """See `Ranks.abort`."""
        self._is_aborted = True

    def check(self) -> None:
        """See `Ranks.check`."""
        if self._is_aborted:
            raise RankLostError("a process of this model has ended")

    @property
    def waited_s(self) -> float:
        """See `Ranks.waited_s`."""
        return 0.0


class RankLink:
    """The place in a rank's weights where the other ranks belong: weights are made, and shared with other workers of
    the host, without them, and a runner connects its own.
    """

    __slots__ = ("_ranks",)

    def connect(self, ranks: Ranks) -> None:
        """Makes these the ranks that all layers of the weights join their results with."""
        self._ranks = ranks

    @property
    def ranks(self) -> Ranks:
        """Returns the ranks that were connected."""
        return self._ranks


def part_of(rank: int, size: int, length: int) -> range:
    """Returns a rank's places of so many, of which each rank has the same number, or one more than others."""
    return range(rank * length // size, (rank + 1) * length // size)
