"""A child process ends with the process that started it, however that one ends.

The parent names itself in the child's environment (`environment`); the child calls `hold` before it does anything
slow. On Linux the kernel then kills the child when its parent is gone, SIGKILL of the parent included, and a frozen
child as well. Elsewhere a thread looks once a second who the parent is. A process that was started by hand has no
lifeline and lives as long as it likes.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_VARIABLE = "BATON_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def environment() -> dict[str, str]:
    """The variable that a parent adds to a child's environment.

    The kernel watches the thread that starts the child, so this thread must live as long as the parent is to.
    """
    return {PARENT_VARIABLE: str(os.getpid())}


def hold() -> None:
    """Ties this process to the parent that its environment names, if any. Exits if that one is gone already."""
    named = os.environ.pop(PARENT_VARIABLE, None)
    if named is not None:
        hold_to(int(named))


def hold_to(parent: int) -> None:
    """Ties this process to its parent, by the parent's process id. Exits if that one is gone already."""
    if sys.platform == "linux":
        _die_with_parent()
    else:
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was told, so nobody will tell us
        sys.exit(f"baton: the parent process {parent} is gone")


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
