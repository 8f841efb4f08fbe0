"""The threads of the ranks of a group: each has an equal part of the group's share of the cores, for all of a step.
Where ranks are hosts, each has as many threads as the host with the fewest cores.

The ranks wait for each other in every layer, and rows must be cut into the same blocks on all of them. So threads are
not adjusted in the middle of a step, and rank 0 decides for all.
"""

from services.engine.runner.cpu.cores import PROMPTS_SPIN_MS, CoreShare, Threads
from services.engine.runner.group.messages import RankThreads


class GroupCores:
    """The threads of one rank, in the place of a `CoreShare`."""

    def __init__(self, openmp: Threads) -> None:
        self._openmp = openmp
        self._threads = RankThreads(1, prompts=False, shares_prompts=False)

    def follow(self, threads: RankThreads) -> None:
        """Sets the threads of the next step."""
        self._threads = threads

    def begin(self, *, prompts: bool) -> None:
        """Starts a step."""
        self._openmp.set_num_threads(self._threads.number)
        if self._threads.prompts:
            self._openmp.spin(PROMPTS_SPIN_MS)
        else:
            self._openmp.spin()

    def adjust(self) -> None:
        """Does nothing: a step keeps its threads."""

    def adjust_for_prompts(self) -> None:
        """Does nothing: a step keeps its threads."""

    def shares_prompts(self) -> bool:
        """Returns True if this step and one of another worker compute prompts."""
        return self._threads.shares_prompts

    def end(self) -> None:
        """Ends the step: its threads sleep."""
        self._openmp.sleep()


class LeadingCores(GroupCores):
    """The threads of rank 0, which has the group's share of the cores."""

    def __init__(self, openmp: Threads, share: CoreShare, num_ranks: int, most: int | None = None) -> None:
        """num_ranks: of this host. most: threads of a rank at most; None: as the share says."""
        super().__init__(openmp)
        self._share, self._num_ranks, self._most = share, num_ranks, most

    def lead(self, *, prompts: bool) -> RankThreads:
        """Starts a step of the group. Returns the threads of each rank, which the others follow."""
        self._share.begin(prompts=prompts)
        number = max(1, self._share.num_threads // self._num_ranks)
        number = number if self._most is None else min(number, self._most)
        threads = RankThreads(number, prompts, self._share.shares_prompts())
        self.follow(threads)
        return threads

    def end(self) -> None:
        """Ends the step: other workers may have the cores."""
        super().end()
        self._share.end()
