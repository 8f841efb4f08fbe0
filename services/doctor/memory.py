"""Memory, and the limits on files and on locked memory."""

import resource
import shutil
from pathlib import Path

import psutil

from services.doctor.finding import Finding, error, note, ok, warning
from services.doctor.processor import CGROUP

MIN_FREE_BYTES = 2 << 30
MIN_SHARED_BYTES = 16 << 20
MIN_FILES = 4096
SHARED_MEMORY = Path("/dev/shm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_GIB = 1 << 30
_MIB = 1 << 20


def check_memory(*, has_rdma: bool) -> list[Finding]:
    """Looks at memory and limits. has_rdma: there is a port whose driver locks the memory that it reads."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        check_free(psutil.virtual_memory().available, memory_limit(CGROUP)),
        check_shared(SHARED_MEMORY),
        check_huge_pages(HUGE_PAGES),
        check_files(files),
        check_locked(locked, has_rdma=has_rdma),
    ]


def memory_limit(cgroup: Path) -> int | None:
    """Returns the bytes that this control group (version 2) may still take; None: no limit is known."""
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # the root group has no such files
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)


def check_free(available: int, left_by_limit: int | None) -> Finding:
    """Tells how much memory a worker would find. Both in bytes."""
    free = available if left_by_limit is None else min(available, left_by_limit)
    found = f"{free / _GIB:.1f} GiB are free"
    if free < MIN_FREE_BYTES:
        return warning("memory", found, "little for a model and its KV: set --kv-memory, or make room")
    return ok("memory", found)


def check_shared(directory: Path) -> Finding:
    """Looks for room in /dev/shm, where workers of one machine keep the table by which they share cores."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as reason:
        return warning("shared memory", f"{directory}: {reason.strerror}", "mount a tmpfs there")
    found = f"{directory} has {free / _MIB:,.0f} MiB free"
    if free < MIN_SHARED_BYTES:
        return warning("shared memory", found, f"make it larger: {MIN_SHARED_BYTES // _MIB} MiB are the least")
    return ok("shared memory", found)


def check_huge_pages(file: Path) -> Finding:
    """Tells whether a worker gets huge pages where it asks for them (madvise)."""
    try:
        words = file.read_text()
    except OSError:
        return note("huge pages", "this kernel has none that are transparent")
    if "[never]" in words:
        return warning("huge pages", "transparent ones are off", f"echo madvise > {file} (weights are read faster)")
    return ok("huge pages", "transparent ones where a process asks for them, or everywhere")


def check_files(limit: int) -> Finding:
    """Compares the limit of open files with the connections of a gateway. limit: -1 for none."""
    if limit != resource.RLIM_INFINITY and limit < MIN_FILES:
        return warning("open files", f"{limit} at once; each connection is one", "ulimit -n 65536 before a gateway")
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} at once")


def check_locked(limit: int, *, has_rdma: bool) -> Finding:
    """Looks at the limit of locked memory. limit: bytes, -1 for none."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    found = f"{limit / _MIB:,.1f} MiB"
    if has_rdma:
        return error("locked memory", f"{found}: RDMA locks all of a worker's KV", "ulimit -l unlimited (IPC_LOCK)")
    return note("locked memory", f"{found}; only RDMA needs more, and no port for it is active here")
