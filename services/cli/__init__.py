"""The `baton` command."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from services.config.option import Refusal
from services.process import child_config, lifeline, signals

_BRIEF = (
    ["drain"],
    ["doctor"],
    ["top"],
    ["ls"],
    ["requests"],
)  # commands that ask others, print what they say, and end


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

        commands.app(prog_name="baton")
    except Refusal as refusal:
        print(f"baton: {refusal}", file=sys.stderr)
        _exit(1)
    except KeyboardInterrupt:
        _exit(130)
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # a text, which Python prints
            raise
        _exit(ended.code)


def _exit(code: int) -> NoReturn:
    """Ends the process with what it has printed. That of a brief command ends without the interpreter's own end.

    gRPC's threads outlive the last channel for a moment: one under which the interpreter is taken down may crash, and
    the command's exit code is then that of SIGSEGV, whatever came of it.
    """
    if sys.argv[1:2] not in _BRIEF:
        sys.exit(code)
    with contextlib.suppress(BrokenPipeError):  # nobody reads it any more, as after `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Ends the process at once, until it has a way of its own to end.

    An exception would not do: a worker that loads a model collects garbage much of the time, and what is raised in a
    callback of the collector is printed and dropped.
    """
    os._exit(128 + number)
