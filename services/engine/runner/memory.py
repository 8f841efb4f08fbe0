"""The memory that this process may still take, and the pool's share of it."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import structlog

from kvtransfer.block_memory import BlockMemory
from kvtransfer.regions import areas
from services.engine.kernels.cpu.shared_file import HUGE_BYTES, MADV_COLLAPSE
from services.protocol.model_files.base import ModelError

MAX_DEFAULT_KV_BYTES = 4 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OWN_MAPPING_BYTES = 128 << 10  # glibc's own size, before it has freed larger memory
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h
_POPULATED_AT_ONCE = 64 << 20
_CGROUP = Path("/sys/fs/cgroup")

log = structlog.get_logger()


def available_bytes() -> int:
    """Returns the free memory of the machine, or of the container if that is less."""
    available = int(psutil.virtual_memory().available)
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    return available if limit is None or used is None else max(0, min(available, limit - used))


def check_fits(needed: int, what: str) -> None:
    """Raises ModelError if less memory is left than needed."""
    available = available_bytes()
    if needed > available:
        raise ModelError(f"{what} needs {needed / 2**30:.2f} GiB of memory, {available / 2**30:.2f} GiB are free")


def kv_budget(asked: int | None, reserved: int = 0) -> int:
    """Returns the bytes for the pool: as asked, else a quarter of the free memory, at most 4 GiB. Raises ModelError.

    reserved: bytes of what is free that weights are still to take.
    """
    if asked is None:
        return min(max(0, available_bytes() - reserved) // 4, MAX_DEFAULT_KV_BYTES)
    check_fits(asked, "the KV pool")
    return asked


def populate(blocks: BlockMemory, start: int = 0, end: int | None = None) -> bool:
    """Asks the kernel for the pages of these blocks now, with their content unchanged; returns whether it gave them.

    start, end: bytes of the blocks laid end to end, end None: to the last one.

    Otherwise a step or a read gets each page when it first touches it, as it does if the kernel cannot provide them now
    (Linux before 5.14). A device's memory needs no such call. Reading 24 MiB into such pages took 5 ms with all pages
    there, 6 if the kernel had to find them, and 120 on a virtual machine whose host had to.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None or blocks.device is not None:
        return False
    size = blocks.num_blocks * blocks.block_bytes
    end = size if end is None else min(end, size)
    return all(_populate(madvise, *area) for area in areas(blocks.regions, blocks.block_bytes, start, end))


def _populate(madvise: Callable[..., int], address: int, num_bytes: int) -> bool:
    last = address + num_bytes
    for here in range(address - address % mmap.PAGESIZE, last, _POPULATED_AT_ONCE):  # signals are handled in between
        length = min(_POPULATED_AT_ONCE, last - here)
        if madvise(ctypes.c_void_p(here), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            log.info("memory is not provided ahead", reason=os.strerror(ctypes.get_errno()).lower())
            return False
        _collapse(madvise, here, here + length)
    return True


def _collapse(madvise: Callable[..., int], begin: int, end: int) -> None:
    """Asks for huge pages in the place of small ones, which shared memory has otherwise (Linux 6.1). Whatever is not
    collapsed stays as it is.
    """
    first, last = -(-begin // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
    if first < last:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory up to these sizes. Does nothing with other C libraries.

    Without it, a prefill step's activations fault in again at every step.
    """
    _set_malloc(mapping_bytes=32 << 20, trim_bytes=256 << 20)  # the first is the most that glibc accepts


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Makes glibc return each tensor's memory to the system when it is freed, as long as the context lasts; then calls
    `keep_freed_memory`.

    In glibc's heap, tensors that are packed and freed, layer after layer, lie between small ones that stay, and a part
    of their memory is not used again: 150 MiB at the end of a load of 135M parameters in bfloat16.
    """
    _set_malloc(mapping_bytes=_OWN_MAPPING_BYTES, trim_bytes=_OWN_MAPPING_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def _set_malloc(*, mapping_bytes: int, trim_bytes: int) -> None:
    """Sets from which size on memory is mapped by itself, and how much free memory the heap's end keeps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mapping_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)


def _read_int(path: Path) -> int | None:
    """Returns the number in a cgroup file. None: no such file here, or no limit ("max")."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
