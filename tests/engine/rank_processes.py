"""Processes that are the ranks of one model, for tests: each does what it is told over a pipe."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate

from services.engine.kernels.cpu.shared_ranks import RankSizes, SharedRanks
from tests.forkserver import FORKSERVER

_LONG_S = 120.0


class RankProcesses:
    """As many processes as the largest group needs. Groups come one after the other."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        for _ in range(len(self._pipes), self._most):
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
        self._start()
        made = SharedRanks.create(sizes)
        try:
            for rank, pipe in enumerate(self._pipes[: sizes.size]):
                pipe.send((f"/proc/{os.getpid()}/fd/{made.fd}", rank, act, arguments, options))
            answers = self._answers(sizes.size)
        finally:
            made.abort()
            os.close(made.fd)
        return [result for _, result in sorted(answers.items())]

    def _answers(self, size: int) -> dict[int, Any]:
        """Returns what each rank answers. The first one that fails, or says nothing for long, ends all of them."""
        answers: dict[int, Any] = {}
        while len(answers) < size:
            waiting = [rank for rank in range(size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in waiting], _LONG_S)
            heard = {rank: self._pipes[rank].recv() for rank in waiting if self._pipes[rank] in ready}
            failures = [answer for failed, answer in heard.values() if failed]
            if failures or not heard:
                self.close()
                raise AssertionError("\n".join(failures) or f"ranks {waiting} say nothing")
            answers |= {rank: answer for rank, (_, answer) in heard.items()}
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join(_LONG_S)
        self._pipes.clear()
        self._processes.clear()


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
