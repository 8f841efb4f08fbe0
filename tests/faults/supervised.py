"""Workers that are started again when they end, as the launcher does it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from tests.e2e.stack import Stack


@contextlib.contextmanager
def supervised(stack: Stack, prepare: Callable[[], None] | None = None) -> Iterator[list[str]]:
    """Starts workers again while the context lasts. Gives their names, one for each start."""
    over, started = threading.Event(), list[str]()

    def watch() -> None:
        while not over.wait(0.1):
            started.extend(stack.start_ended(prepare))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield started
    finally:
        over.set()
        thread.join()
