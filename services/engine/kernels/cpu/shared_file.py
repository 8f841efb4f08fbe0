"""Weights in memory that several processes of one user map: a file without a name (memfd), which the kernel frees when
the last process that has it ends, however it ends.

    ┌──────────────┬──────────────┬─────┬────────┬───────────────────────────────┐
    │ weight       │ weight       │ ... │ image  │ where the image is, the name  │
    └──────────────┴──────────────┴─────┴────────┴───────────────────────────────┘
    0, a border of huge pages                                   the last _TAIL bytes

One process writes the file, and seals it when all of it is there: then nobody can write to it any more, this process
included. A file that is not sealed is not complete, so nobody else maps it. The image is bytes that say what lies
where. Descriptors are used again, so a file says itself whose weights it has: it is mapped by that name alone.

A file like this has small pages, unless the system's setting for shared memory (`shmem_enabled`) is another than the
usual `never`; but the kernel puts into huge pages what a process asks it to (MADV_COLLAPSE, Linux 6.1), even so.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from hashlib import sha256
from typing import Any

import numpy as np
import psutil

HUGE_BYTES = 2 << 20  # bytes of a huge page
_LINE = 64
_TAIL = struct.Struct("<QQ32s16s")  # offset and size of the image, digest of the name, _MAGIC
_MAGIC = b"baton's weights\n"
_NAME = "baton-weights"
MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # asm-generic/mman.h
_SEALS = 0xF  # linux/fcntl.h: F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
_ADD_SEALS, _GET_SEALS = 1033, 1034  # linux/fcntl.h


class SharedFileError(Exception):
    """A shared file cannot be made, or is none that may be used: one line."""


class Mapping:
    """Memory of a file, mapped at a border of huge pages. It exists as long as this object or an array of it does."""

    def __init__(self, file: int, num_bytes: int, *, writable: bool) -> None:
        """Takes over `file`, a descriptor. Raises OSError."""
        self.file, self.num_bytes = file, num_bytes
        try:
            self.address, begin, length = _map(file, num_bytes, writable=writable)
        except BaseException:
            os.close(file)
            raise
        self._end = weakref.finalize(self, _unmap, file, begin, length)
        self._end.atexit = False  # kernels may still read

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.num_bytes,), "data": (self.address, False)}

    def array(self) -> np.ndarray:
        """Returns the memory, uint8[bytes]. Numpy does not know whether it may be written."""
        return np.asarray(self)


class SharedFile:
    """A shared file that this process writes. Raises SharedFileError where the system has no room or no such files."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise SharedFileError("this system has no files without names (memfd)")
        self._used = self._provided = self.huge_bytes = 0
        self._collapses = True
        # Nothing of it is taken before it is written; more than all of the machine's memory never is.
        capacity = -(-int(psutil.virtual_memory().total) // HUGE_BYTES) * HUGE_BYTES
        try:
            file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(file, stat.S_IRUSR | stat.S_IWUSR)
            self._mapping = Mapping(file, capacity, writable=True)
        except OSError as error:
            raise _no_room(error) from error
        self._array: np.ndarray | None = self._mapping.array()

    @property
    def file(self) -> int:
        """Returns the descriptor, which is open as long as there is memory of the file."""
        return self._mapping.file

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes are taken."""
        return self._used

    def offset_of(self, address: int) -> int | None:
        """Returns the place in the file of what lies at this address; None: it is not in the file."""
        offset = address - self._mapping.address
        return offset if 0 <= offset < self._used else None

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns zeroed memory, uint8[num_bytes], on a border of cache lines."""
        assert self._array is not None, "the file is sealed"
        begin, self._used = self._used, self._used + -(-num_bytes // _LINE) * _LINE
        if self._used > self._provided:
            self._provide()
        return self._array[begin : begin + num_bytes]

    def finish(self, image: bytes, name: str) -> Mapping:
        """Writes the image, and seals the file. Returns all of it, to be read. No weights of it may be in use any more.

        name: what `open_sealed` is to ask for. Raises SharedFileError if weights are in use, or there is no room.
        """
        offset = self._used
        # The end of the file is that of a huge page; the tail lies before it.
        end = -(-(offset + len(image) + _TAIL.size) // HUGE_BYTES) * HUGE_BYTES
        space = self.take(end - offset)
        space[: len(image)] = np.frombuffer(image, dtype=np.uint8)
        space[-_TAIL.size :] = np.frombuffer(_TAIL.pack(offset, len(image), _digest(name), _MAGIC), dtype=np.uint8)
        file = os.dup(self.file)
        try:
            del space
            self._array = None
            del self._mapping  # its memory may not be written any more: else the kernel refuses the seal
            fcntl.fcntl(file, _ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(file)
            raise SharedFileError(f"weights of the file are still in use: {error.strerror}") from error
        try:
            return Mapping(file, end, writable=False)
        except OSError as error:
            raise _no_room(error) from error

    def _provide(self) -> None:
        """Gives the file its pages up to what is taken: huge ones, where there are any."""
        begin, self._provided = self._provided, -(-self._used // HUGE_BYTES) * HUGE_BYTES
        try:
            os.truncate(self.file, self._provided)
        except OSError as error:
            raise _no_room(error) from error
        assert self._array is not None
        for here in range(begin, self._provided, HUGE_BYTES):
            if not self._collapses:
                return
            self._array[here] = 0  # a range without any page is not put into a huge one
            error_number = _collapse(self._mapping.address + here)
            if error_number == 0:
                self.huge_bytes += HUGE_BYTES
            elif error_number != errno.EAGAIN:  # this kernel does not do it, or may not, or has no huge pages left
                self._collapses = False


def why_no_huge_pages() -> str | None:
    """Returns why shared memory has no huge pages, here and now; None: it has."""
    try:
        file = SharedFile()
        file.take(_LINE)
    except SharedFileError as error:
        return str(error)
    if file.huge_bytes:
        return None
    return "shared memory gets no huge pages here, from which weights are read faster (--share-weights on shares them)"


def open_sealed(path: str, name: str) -> Mapping:
    """Maps a shared file of this user that is complete and has this name, to be read. Raises SharedFileError for any
    other.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        raise SharedFileError(f"{path}: {error.strerror}") from error
    try:
        _check(file, path)
    except BaseException:
        os.close(file)
        raise
    try:
        mapping = Mapping(file, os.fstat(file).st_size, writable=False)
    except OSError as error:
        raise _no_room(error) from error
    _, _, digest = _tail(mapping)
    if digest != _digest(name):
        raise SharedFileError(f"{path}: it has other weights")
    return mapping


def written_bytes(path: str) -> int | None:
    """Returns how many bytes of a shared file there are so far; None: there is no such file, or no longer."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_blocks * 512


def image_of(mapping: Mapping) -> bytes:
    """Returns the image of a complete file. Raises SharedFileError."""
    offset, size, _ = _tail(mapping)
    return mapping.array()[offset : offset + size].tobytes()


def _tail(mapping: Mapping) -> tuple[int, int, bytes]:
    """Returns where the image of a complete file begins, its size, and the digest of the file's name."""
    content = mapping.array()
    if len(content) < _TAIL.size:
        raise SharedFileError("a shared file without an end")
    offset, size, digest, magic = _TAIL.unpack(content[-_TAIL.size :].tobytes())
    if magic != _MAGIC or offset + size > len(content) - _TAIL.size:
        raise SharedFileError("a file that is sealed, but has no weights")
    return offset, size, digest


def _digest(name: str) -> bytes:
    return sha256(name.encode()).digest()


def _check(file: int, name: str) -> None:
    """Raises SharedFileError for a file of another user, or one that anybody can still write."""
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SharedFileError(f"{name}: other users own or may open it")
    try:
        seals = fcntl.fcntl(file, _GET_SEALS)
    except OSError as error:
        raise SharedFileError(f"{name}: it is no shared file") from error
    if seals & _SEALS != _SEALS:
        raise SharedFileError(f"{name}: it is not complete")


def _collapse(address: int) -> int:
    """Puts the pages of HUGE_BYTES bytes into a huge one. Returns 0, or the number of the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES), MADV_COLLAPSE) == 0
    return 0 if done else ctypes.get_errno()


def _map(file: int, num_bytes: int, *, writable: bool) -> tuple[int, int, int]:
    """Maps a file to a border of huge pages. Returns its address, and begin and length of all that is reserved."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    length = num_bytes + HUGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = libc.mmap(None, length, 0, private, -1, 0)
    if begin == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address = -(-begin // HUGE_BYTES) * HUGE_BYTES
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if libc.mmap(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != address:
        error = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(length))
        raise OSError(error, os.strerror(error))
    return address, begin, length


def _unmap(file: int, begin: int, length: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(begin), ctypes.c_size_t(length))
    os.close(file)


def _no_room(error: OSError) -> SharedFileError:
    return SharedFileError(f"no shared memory: {(error.strerror or str(error)).lower()}")
