"""The processes of the ranks above 0: they start with their worker, are watched, and end with it.

A rank that ends, or that somebody has stopped, ends the group: the wait of the others for it is aborted, and the worker
ends like one whose engine failed. A rank whose worker ends is killed by the kernel (`lifeline`).
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from services.engine.runner.group.rank_config import RankAnswer, RankConfig
from services.process import child_config, lifeline
from services.protocol.model_files.base import ModelError

_LOOK_S = 0.2  # between two looks at whether ranks are stopped
_NOTICED_S = 2.0  # in which the watch has seen what others saw before
_GRACE_S = 2.0  # for ranks that were told to end
_STOPPED = ("T", "t")  # in /proc/PID/stat

log = structlog.get_logger()


class RankProcess:
    """The process of one rank."""

    def __init__(self, config: RankConfig) -> None:
        """Starts it, on a thread that lives as long as this process. Its log lines are this process's."""
        self.rank = config.rank
        self._answers, answer = os.pipe()
        config = replace(config, answer=answer)
        try:
            self.process = subprocess.Popen(
                # -P: a folder called `services` in the user's current directory is not ours.
                [sys.executable, "-P", "-m", "services.engine.runner.group.rank_main", child_config.FLAG],
                env={**os.environ, **lifeline.environment(), **child_config.environment(config)},
                stdin=subprocess.DEVNULL,
                pass_fds=config.descriptors,
                process_group=0,  # a terminal's Ctrl-C is for rank 0, which drains
            )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(answer)

    def answer(self) -> RankAnswer:
        """Waits for what the rank says. Raises ModelError where it cannot serve."""
        with os.fdopen(self._answers, "rb", closefd=False) as lines:
            line = lines.readline()
        if not line:
            raise ModelError(f"rank {self.rank} did not start: {_how_it_ended(self.process.wait())}")
        answer = RankAnswer.unpack(line)
        if answer.refused:
            raise ModelError(f"rank {self.rank}: {answer.refused}")
        return answer

    def is_stopped(self) -> bool:
        """Returns True if somebody has stopped the process (SIGSTOP)."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # it ended, which the pipe tells, or this is not Linux
            return False
        return stat.rpartition(")")[2].split()[0] in _STOPPED

    @property
    def open_while_it_lives(self) -> int:
        """Returns a descriptor that can be read from once the process has ended."""
        return self._answers

    def end(self, grace_s: float) -> None:
        """Waits for the end of the process for so long, then kills it."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._answers)


class RankProcesses:
    """The processes of all ranks above 0, and the watch on them."""

    def __init__(self, configs: Sequence[RankConfig]) -> None:
        """Starts them."""
        self._ranks: list[RankProcess] = []
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None
        self.lost: str | None = None  # why the group is over, in words
        self._is_lost = threading.Event()
        try:
            for config in configs:
                self._ranks.append(RankProcess(config))
        except BaseException:
            self.close(0.0)
            raise

    def answers(self) -> list[RankAnswer]:
        """Waits until all have loaded. Raises ModelError where one cannot serve; then all are ended."""
        try:
            return [rank.answer() for rank in self._ranks]
        except BaseException:
            self.close(0.0)
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Watches all that have loaded, on a thread. on_lost: called there, once, with the reason in words."""
        self._watch = threading.Thread(target=self._run, args=(on_lost,), name="ranks", daemon=True)
        self._watch.start()

    def why_lost(self) -> str | None:
        """Returns why the group is over, for who has noticed that it is; None: no rank is known to be lost."""
        self._is_lost.wait(_NOTICED_S)
        return self.lost

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Ends the watch, and all ranks, which were told to end."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        for rank in self._ranks:
            rank.end(grace_s)
        self._ranks.clear()

    def _run(self, on_lost: Callable[[str], None]) -> None:
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank.open_while_it_lives, select.POLLIN)
        while not self._closing.is_set():
            ended = [fd for fd, _ in poll.poll(_LOOK_S * 1000)]
            if (lost := self._why_lost(ended)) is not None and not self._closing.is_set():
                self.lost = lost
                self._is_lost.set()
                log.error("a rank is lost", reason=lost)
                for rank in self._ranks:  # the group is over: nobody waits for one that stands still
                    rank.process.kill()
                on_lost(lost)
                return

    def _why_lost(self, ended: Sequence[int]) -> str | None:
        for rank in self._ranks:
            if rank.open_while_it_lives in ended:
                with suppress(subprocess.TimeoutExpired):
                    return f"rank {rank.rank} ended: {_how_it_ended(rank.process.wait(_GRACE_S))}"
                return f"rank {rank.rank} has closed its end"
            if rank.is_stopped():
                return f"rank {rank.rank} is stopped"
        return None


def _how_it_ended(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"
