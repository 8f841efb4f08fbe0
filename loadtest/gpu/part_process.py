"""A process in which pieces of parts run; after a piece that fails, the next one gets a new process.


A kernel's error spoils all that its process does on the GPU later, and some errors end the process, or never end.
Records come as they are measured, and those of a piece that fails later are kept."""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Self

from loadtest.children import Child
from loadtest.tables import Record

if TYPE_CHECKING:
    from loadtest.gpu.bench import Bench

Found = Record | str  # a record of the part's table, or a note: a line for people
Piece = Callable[["Bench"], Iterator[Found]]  # to be pickled

_OURS = ("kvtransfer", "loadtest", "protos", "services")
_LAST_LINES = 12
_START_S = 60.0


@dataclass(slots=True)
class Outcome:
    """Records and notes of a piece, and the way in which it ended."""

    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False
    left_out: bool = False  # a package that the piece needs is not installed

    def add(self, found: Found) -> None:
        """Adds a record or a note."""
        if isinstance(found, str):
            self.notes.append(found)
        else:
            self.records.append(found)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a piece, as its process tells it."""

    missing: str = ""  # a module that is not there
    error: str = ""  # the last lines of a traceback


class PartProcess:
    """Runs one piece after the other. Use as a context manager."""

    def __init__(self, seed: int) -> None:
        self._seed = seed  # of random cases
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, piece: Piece, limit_s: float) -> Outcome:
        """Runs a piece, for at most `limit_s`; the start of a process does not count."""
        outcome = Outcome()
        try:
            pipe = self._started().pipe
            deadline = time.monotonic() + limit_s
            pipe.send(piece)
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                found: Found | _End = pipe.recv()
                if isinstance(found, _End):
                    return self._ended(outcome, found)
                outcome.add(found)
            why = f"no end after {limit_s:.0f} s"
        except (EOFError, OSError):
            assert self._child is not None
            why = f"its process ended with {self._child.exit_code()}"
        return self._ended(outcome, _End(error=why))

    def _ended(self, outcome: Outcome, end: _End) -> Outcome:
        if end.missing:
            outcome.notes.append(f"left out: {end.missing}")
            outcome.left_out = True
        if end.error:
            outcome.notes.append(f"failed: {end.error}")
            outcome.failed = True
            self._end()
        return outcome

    def _started(self) -> Child:
        if self._child is None:
            self._child = Child(_serve, self._seed, is_parent=True)
            if not self._child.pipe.poll(_START_S):
                raise EOFError
            self._child.pipe.recv()
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _serve(pipe: Connection, seed: int) -> None:
    """Runs pieces as they come, until the pipe is closed."""
    from loadtest.gpu.bench import Bench  # imported only here: it needs torch

    bench = Bench(seed)
    pipe.send(_End())  # the process is ready
    while True:
        try:
            piece: Piece = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(piece, bench, pipe))


def _run(piece: Piece, bench: "Bench", pipe: Connection) -> _End:
    try:
        for found in piece(bench):
            pipe.send(found)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OURS:
            return _End(missing=str(error))
        return _End(error="\n".join(traceback.format_exc().splitlines()[-_LAST_LINES:]))
    return _End()
