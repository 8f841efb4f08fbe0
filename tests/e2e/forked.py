"""Worker processes without the time that it takes to import torch."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from services import cli
from services.process import lifeline
from tests.forkserver import FORKSERVER
from tests.pace import pace_engines


class WorkerProcess:
    """`baton prefill` or `baton decode`, at the pace of `tests/pace.py`. It ends with this process.

    Its environment is this one's, unless another is given. prepare: called in it before it begins.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._process = FORKSERVER.Process(target=_run_baton, args=(arguments, environment, prepare))
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

    def end(self, timeout_s: float) -> int | None:
        """SIGTERM; the exit code, or None where it has not ended in time."""
        self._process.terminate()
        self._process.join(timeout_s)
        return self._process.exitcode

    def stop(self) -> None:
        """Ends it, first nicely."""
        self.thaw()
        self._process.terminate()
        self._process.join(30)
        self.kill()


def _run_baton(
    arguments: Sequence[str], environment: Mapping[str, str] | None, prepare: Callable[[], None] | None
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
