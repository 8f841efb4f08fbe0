"""A thread that writes log lines, so that nobody who logs waits for a disk or a pipe, or fails with it.

The standard library's QueueHandler and QueueListener do the same for its own loggers; their queue has a lock, which a
garbage collection that logs could meet twice, a full queue is an error, and each line is written by itself. Here lines
that come within a few milliseconds are one write, which costs the caller less than a write of its own.
"""

import atexit
import os
import select
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TextIO

MAX_WAITING_LINES = 10_000

_GATHER_S = 0.005  # lines that come meanwhile are written with the first one
_MAX_LINES_AT_ONCE = 1000
_EXIT_S = 2.0  # for the last lines, at the process's end


class LogWriter:
    """Writes lines to one stream, in the order in which they came, until the process's end or `close`.

    A line that cannot be written, or finds MAX_WAITING_LINES before it, is dropped.
    num_dropped: dropped lines so far.
    """

    def __init__(self, stream: TextIO, describe_drops: Callable[[int], str]) -> None:
        """describe_drops: returns the line that says how many lines were dropped before it."""
        self.num_dropped = 0
        self._num_told = 0  # of the dropped lines, those that a line has told of
        self._write = _writer_of(stream)
        self._describe_drops = describe_drops
        self._broken = False  # the last write failed, maybe within a line
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, line: str) -> None:
        """Queues a line, written soon. Never waits, never raises, and may be called within a garbage collection."""
        if self._lines.qsize() < MAX_WAITING_LINES and not self._closed:
            self._lines.put(line)
        else:
            self.num_dropped += 1

    def flush(self) -> None:
        """Waits until all lines so far are written or dropped, at most _EXIT_S."""
        done = threading.Event()
        self._lines.put(done)
        done.wait(_EXIT_S)

    def close(self) -> None:
        """Writes the lines that wait, in at most _EXIT_S. Later lines are dropped."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self.flush()

    def _run(self) -> None:
        while True:
            first = self._lines.get()
            if isinstance(first, str):
                time.sleep(_GATHER_S)
            lines, flushes = self._waiting(first)
            if lines:
                self._write_all(lines)
            for done in flushes:
                done.set()
            if self._closed and flushes:
                return

    def _waiting(self, first: str | threading.Event) -> tuple[list[str], list[threading.Event]]:
        """Returns what waits, up to the first flush."""
        lines: list[str] = []
        one = first
        while isinstance(one, str):
            lines.append(one)
            if len(lines) == _MAX_LINES_AT_ONCE:
                return lines, []
            try:
                one = self._lines.get_nowait()
            except Empty:
                return lines, []
        return lines, [one]

    def _write_all(self, lines: list[str]) -> None:
        dropped = self.num_dropped
        told = [self._describe_drops(dropped - self._num_told)] if dropped > self._num_told else []
        text = ("\n" if self._broken else "") + "".join([f"{line}\n" for line in (*told, *lines)])
        try:
            self._write(text.encode(errors="backslashreplace"))
        except (OSError, ValueError):  # a full disk, nobody at the pipe's other end, a closed file
            self.num_dropped += len(lines)
            self._broken = True
        else:
            self._num_told = dropped
            self._broken = False


def _writer_of(stream: TextIO) -> Callable[[bytes], object]:
    """Returns the function that writes all of some bytes. Raises OSError, ValueError."""
    try:
        descriptor = stream.fileno()
    except OSError:  # it is in memory
        return lambda data: stream.write(data.decode())

    def write(data: bytes) -> None:  # not through the stream: it would keep what it cannot write, and fail at exit
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # the process that gave us the pipe may have made it so
                select.select([], [descriptor], [])

    return write
