"""Processes that are the ranks of one model, for tests: each does what it is told over a pipe."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Concatenate

from services.engine.kernels.cpu.shared_ranks import RankSizes, SharedRanks
from tests.forkserver import FORKSERVER

_LONG_S = 120.0


class RankProcesses:
    """As many processes as the largest group needs. Groups come one after the other."""

    def __init__(self, most: int) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(most):
            pipe, others = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=_obey, args=(others,), daemon=True)
            process.start()
            others.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def do(
        self, sizes: RankSizes, act: Callable[Concatenate[SharedRanks, ...], Any], *arguments: Any, **options: Any
    ) -> list[Any]:
        """Runs it in each process of a new group, with its rank. Returns what it returns; raises what it raises.

        A rank that fails ends the others' waits.
        """
        made = SharedRanks.create(sizes)
        try:
            for rank, pipe in enumerate(self._pipes[: sizes.size]):
                pipe.send((f"/proc/{os.getpid()}/fd/{made.fd}", rank, act, arguments, options))
            answers = []
            for pipe in self._pipes[: sizes.size]:
                assert pipe.poll(_LONG_S), "a rank says nothing"
                answers.append(pipe.recv())
        finally:
            made.abort()
            os.close(made.fd)
        failures = [words for failed, words in answers if failed]
        # A rank that lost another one failed for that reason.
        assert not failures, min(failures, key=lambda words: "RankLostError" in words)
        return [result for _, result in answers]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join(_LONG_S)


@contextmanager
def rank_processes(most: int) -> Iterator[RankProcesses]:
    """Starts processes, and ends them."""
    processes = RankProcesses(most)
    try:
        yield processes
    finally:
        processes.close()


def _obey(pipe: Connection) -> None:
    while True:
        path, rank, act, arguments, options = pipe.recv()
        fd = os.open(path, os.O_RDWR)
        ranks = SharedRanks.join(fd, rank)
        os.close(fd)
        try:
            pipe.send((False, act(ranks, *arguments, **options)))
        except BaseException:
            ranks.abort()
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
