"""Messages from one process to several others of its host, through a ring in shared memory.

    ┌────────┬─────────┬─────────┬─────┬──────────────────────────────────────────┐
    │ header │ reader 0│ reader 1│ ... │ messages, one after the other, in a ring │
    └────────┴─────────┴─────────┴─────┴──────────────────────────────────────────┘
    a cache line each                  at a border of pages

A message is its length and its bytes, and never crosses the end of the ring. Positions only grow; a position's place is
its remainder by the capacity. The writer waits while a reader has not read what would be overwritten. A reader waits a
few microseconds by looking, then by the kernel (futex), so that an idle group costs nothing. It says how many messages
it has done, and the writer can wait for that.

It depends on stores that become visible in their order, as those of x86-64 do; groups are refused elsewhere.
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np

from services.engine.runner.group.shared_pages import SharedPages

_LINE_WORDS = 8
_CAPACITY, _NUM_READERS, _WRITTEN, _SENT = range(4)  # words of the header; _SENT's lower half is what readers wait on
_READ, _DONE, _WAITED = range(3)  # of a reader's line: its position, the messages that it has done, ns that it waited
_LENGTH_BYTES = 8
_TO_THE_START = -1  # in the place of a length: the next message is at the ring's beginning
_LOOKS = 200  # before a reader asks the kernel; some 40 µs
_WAIT_S = 1.0  # at most, in the kernel: a writer that died wakes nobody
_FULL_S = 0.0001
_FUTEX = 202  # the number of the system call on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class StepRing:
    """One end of the ring: the writer's, or a reader's."""

    def __init__(self, pages: SharedPages, reader: int | None) -> None:
        """Joins a ring that was made in these pages. reader: its number; None: the writer."""
        words = pages.array.view(np.int64)
        self.pages = pages
        self._header = words[:_LINE_WORDS]
        self._num_readers = int(self._header[_NUM_READERS])
        self._capacity = int(self._header[_CAPACITY])
        self._reader = reader
        lines = words[_LINE_WORDS : _LINE_WORDS * (1 + self._num_readers)].reshape(-1, _LINE_WORDS)
        self._read, self._done, self._waited = lines[:, _READ], lines[:, _DONE], lines[:, _WAITED]  # by reader
        border = _border_bytes(self._num_readers)
        self._bytes = pages.array[border : border + self._capacity]
        self._futex = _Futex(self._header.ctypes.data + _SENT * 8)

    @classmethod
    def create(cls, num_readers: int, longest: int) -> "StepRing":
        """Makes a ring for messages of at most so many bytes, two of which may be on their way. Raises OSError."""
        capacity = 2 * _padded(longest + 2 * _LENGTH_BYTES)
        pages = SharedPages.create("baton-steps", _border_bytes(num_readers) + capacity)
        header = pages.array.view(np.int64)
        header[_CAPACITY], header[_NUM_READERS] = capacity, num_readers
        return cls(pages, None)

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends the parts as one message to all readers."""
        length = sum(map(len, parts))
        taken = _LENGTH_BYTES + _padded(length)
        assert taken <= self._capacity // 2, f"a message of {length} bytes"
        written = int(self._header[_WRITTEN])
        at = written % self._capacity
        skipped = self._capacity - at if at + taken > self._capacity else 0
        while written + skipped + taken - int(self._read.min()) > self._capacity:
            time.sleep(_FULL_S)
        if skipped:
            self._word(at)[0] = _TO_THE_START
            at = 0
        here = at + _LENGTH_BYTES
        for part in parts:
            self._bytes[here : here + len(part)] = np.frombuffer(part, dtype=np.uint8)
            here += len(part)
        self._word(at)[0] = length
        self._header[_WRITTEN] = written + skipped + taken
        self._header[_SENT] += 1
        self._futex.wake()

    def receive(self) -> bytearray:
        """Returns the next message, when it is there."""
        assert self._reader is not None, "the writer receives nothing"
        position = int(self._read[self._reader])
        self._wait_beyond(position)
        at = position % self._capacity
        if (length := int(self._word(at)[0])) == _TO_THE_START:
            position += self._capacity - at
            at, length = 0, int(self._word(0)[0])
        message = bytearray(self._bytes[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length])
        self._read[self._reader] = position + _LENGTH_BYTES + _padded(length)
        return message

    def done(self, waited_s: float = 0.0) -> None:
        """Says that this reader has done the message that it received last, and how long it has waited for others."""
        self._waited[self._reader] = round(waited_s * 1e9)
        self._done[self._reader] += 1

    def waited_s(self) -> list[float]:
        """Returns the seconds that each reader said last."""
        return [waited / 1e9 for waited in self._waited.tolist()]

    def wait_done(self, check: Callable[[], None]) -> None:
        """Waits until all readers have done all messages. check: asked again and again; its error comes through."""
        looks = 0
        while self._done.min() < self._header[_SENT]:
            check()
            looks += 1
            if looks > _LOOKS:
                time.sleep(_FULL_S)

    def _wait_beyond(self, position: int) -> None:
        header, looks = self._header, 0
        while True:
            sent = int(header[_SENT])  # read before the position: a message after it changes the word
            if header[_WRITTEN] != position:
                return
            looks += 1
            if looks > _LOOKS:
                self._futex.wait(sent & 0xFFFFFFFF, _WAIT_S)

    def _word(self, at: int) -> np.ndarray:
        word: np.ndarray = self._bytes[at : at + _LENGTH_BYTES].view(np.int64)
        return word


class _Futex:
    """A word of 32 bits in shared memory on which processes wait (futex(2))."""

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        self._call = ctypes.CDLL(None, use_errno=True).syscall

    def wait(self, seen: int, most_s: float) -> None:
        """Waits until another process wakes, `most_s` at most, and not at all if the word is not `seen` any more."""
        span = _TimeSpec(int(most_s), int(most_s % 1 * 1e9))
        self._call(_FUTEX, self._address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(span), None, 0)

    def wake(self) -> None:
        """Wakes all that wait."""
        self._call(_FUTEX, self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)


def _border_bytes(num_readers: int) -> int:
    return -(-(1 + num_readers) * _LINE_WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LENGTH_BYTES) * _LENGTH_BYTES
