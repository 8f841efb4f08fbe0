"""The `baton` command."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from services.config.option import Refusal
from services.process import child_config, lifeline, signals


def main() -> None:
    """Runs the console script. A refusal is one line on stderr and exit code 1."""
    lifeline.hold()
    signals.ignore_meaningless()
    # The kernel keeps a signal without a handler from process 1, which this is in a container.
    for number in {signal.SIGTERM, signal.SIGHUP}.intersection(signals.heeded()):
        signal.signal(number, _end)
    try:
        if sys.argv[-1] == child_config.FLAG:
            from services.cli import start

            sys.exit(start.run_child(sys.argv[1]))
        from services.cli import commands

        commands.app()
    except Refusal as refusal:
        sys.exit(f"baton: {refusal}")
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Ends the process at once, until it has a way of its own to end.

    An exception would not do: a worker that loads a model collects garbage much of the time, and what is raised in a
    callback of the collector is printed and dropped.
    """
    os._exit(128 + number)
