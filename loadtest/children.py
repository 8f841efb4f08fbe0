"""Python functions that run in processes of their own, each with a pipe to the process that started it.

A child is a fresh interpreter (`spawn`), so the function and its arguments are pickled. It is killed when nobody needs
it any more; whoever reads its pipe gets EOFError when it ends by itself.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

SPAWN = multiprocessing.get_context("spawn")

_DYING_S = 10.0  # a killed process takes longer only where it waits for a driver that hangs


class Child:
    """A process that runs `target(pipe, *arguments)`. `pipe` is this side's end.

    is_parent: the child starts children of its own. Others end with this interpreter in any case.
    """

    def __init__(self, target: Callable[..., None], *arguments: object, is_parent: bool = False) -> None:
        self.pipe: Connection
        self.pipe, theirs = SPAWN.Pipe()
        self._process: BaseProcess = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=not is_parent)
        self._process.start()
        theirs.close()  # this side's copy: so that the child's end is noticed

    def exit_code(self) -> int | None:
        """Waits for a child whose pipe is at its end. None: it did not end within some seconds."""
        self._process.join(_DYING_S)
        return self._process.exitcode

    def kill(self) -> None:
        """Ends the child and closes the pipe."""
        self._process.kill()
        self._process.join(_DYING_S)
        self.pipe.close()


@contextmanager
def child(target: Callable[..., None], *arguments: object, is_parent: bool = False) -> Iterator[Child]:
    """Starts a child, and kills it when the block ends."""
    started = Child(target, *arguments, is_parent=is_parent)
    try:
        yield started
    finally:
        started.kill()
