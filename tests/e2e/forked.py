"""Processes of Baton without the time that it takes to import what they need."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from services import cli
from services.process import lifeline
from tests.forkserver import FORKSERVER
from tests.pace import pace_engines


class BatonProcess:
    """`baton gateway`, `prefill` or `decode`, these at the pace of `tests/pace.py`. It ends with this process.

    Its environment is this one's, unless another is given. prepare: called in it before it begins.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._process = FORKSERVER.Process(target=_run_baton, args=(arguments, _Output(), environment, prepare))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once it has ended."""
        return self._process.is_alive()

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.running:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None where it has not ended in time."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self, timeout_s: float) -> int | None:
        """SIGTERM; the exit code, or None where it has not ended in time."""
        self.terminate()
        return self.wait(timeout_s)

    def stop(self) -> None:
        """Ends it, first nicely."""
        self.thaw()
        self.end(30)
        self.kill()


class _Output:
    """The standard output and error of the process that makes this, taken over by the one that unpickles it."""

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in (1, 2)]

    def __setstate__(self, files: list[Any]) -> None:
        for number, file in enumerate(files, start=1):
            descriptor = file.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def _run_baton(
    arguments: Sequence[str],
    _output: _Output,
    environment: Mapping[str, str] | None,
    prepare: Callable[[], None] | None,
) -> None:
    """What the console script does, in a process that has been forked already."""
    pace_engines()
    if prepare is not None:
        prepare()
    sys.argv = ["baton", *arguments]
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    os.environ[lifeline.PARENT_VARIABLE] = str(os.getppid())  # the fork server, which ends with the tests
    cli.main()
