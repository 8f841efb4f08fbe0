"""What the system, a library or a defect may raise in a part of a process: that part alone is to fail."""

import pkgutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

FAILURES = (
    OSError(24, "Too many open files"),
    ssl.SSLError(1, "no shared cipher"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ValueError("no value"),
    RuntimeError("can't start new thread"),
)
NAMES = [type(failure).__name__ for failure in FAILURES]


@contextmanager
def failing(where: str, failure: Exception, when: Callable[..., bool] = lambda *_: True) -> Iterator[list[int]]:
    """Makes the real function at a dotted name raise while the context lasts, where `when` says so of its arguments.

    Gives the number of its failures, as the length of a list.
    """
    module, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(module)
    real, failed = getattr(owner, name), list[int]()

    def call(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            failed.append(1)
            raise failure
        return real(*arguments, **named)

    with patch.object(owner, name, call):
        yield failed


def first(number: int) -> Callable[..., bool]:
    """True for the first calls alone."""
    calls = count()
    return lambda *_: next(calls) < number
