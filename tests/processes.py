"""Whether a process lives, asked while it may go at any moment."""

import psutil


def is_zombie(process: psutil.Process) -> bool:
    """Tells True for one that has ended and that its parent has not looked at yet; False also for one that is gone."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Tells True for one that has not ended. A zombie has: whoever adopted it has only not looked yet."""
    return bool(process.is_running()) and not is_zombie(process)
