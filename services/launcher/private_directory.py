"""A directory for one run of `baton up`, which nobody else can open: Redis' socket and certificates."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_PARENT = 70  # letters of a path: that of a socket in there is at most 107


@contextmanager
def private_directory() -> Iterator[Path]:
    """Makes the directory, and takes it away at the end. It is where the system keeps a user's own, if it does."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.path.isdir(runtime) and len(runtime) <= _MAX_PARENT else None
    with tempfile.TemporaryDirectory(prefix="baton-", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)
