"""Worker processes without the time that it takes to import torch."""

import os
import signal
import sys
from collections.abc import Sequence

from services import cli, lifeline
from tests.forkserver import FORKSERVER


class WorkerProcess:
    """`baton prefill` or `baton decode`. It ends with this process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = FORKSERVER.Process(target=_run_baton, args=(arguments,))
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

    def stop(self) -> None:
        """Ends it, first nicely."""
        self.thaw()
        self._process.terminate()
        self._process.join(30)
        self.kill()


def _run_baton(arguments: Sequence[str]) -> None:
    """What the console script does, in a process that has been forked already."""
    sys.argv = ["baton", *arguments]
    os.environ[lifeline.PARENT_VARIABLE] = str(os.getppid())  # the fork server, which ends with the tests
    cli.main()
