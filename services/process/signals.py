"""The signals that end a process of Baton, one rule for all of them.

SIGTERM, SIGINT, SIGHUP   the first one drains the process, a further one ends it at once; one that was ignored when
                          the process began, as SIGHUP is under nohup, stays ignored
SIGUSR1, SIGUSR2          nothing: they mean nothing here, and must not end a service
SIGQUIT                   ends the process at once, as the kernel does
SIGPIPE                   nothing, as in any Python program

A process that ends with its parent, which drains, takes no notice of the first two lines' signals.
"""

import asyncio
import signal
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2)


def heeded() -> list[signal.Signals]:
    """Returns the signals that end this process: those of ENDING that are not ignored."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def ignore_meaningless() -> None:
    """Ignores signals that would end a process and mean nothing here. Children inherit that."""
    for number in _MEANINGLESS:
        signal.signal(number, signal.SIG_IGN)


def leave_to_parent() -> None:
    """Ignores the signals that end a process, too: for one that its parent needs until that has drained."""
    ignore_meaningless()
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def on_ending_signals(drain: Callable[[], object], end: Callable[[], object]) -> None:
    """Makes the event loop call `drain` at the first signal that ends this process, and `end` at each further one."""
    told = False

    def on_signal() -> None:
        nonlocal told
        act, told = end if told else drain, True
        act()

    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, on_signal)
