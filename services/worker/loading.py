"""Shows how far the load of a model is: by a bar on a terminal, by a log line for each stage elsewhere.

Nothing is logged while the bar is drawn: a line would be written into it.
"""

import sys
from types import TracebackType
from typing import Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

log = structlog.get_logger()


class LoadingDisplay:
    """`Progress` on this process's terminal, or in its log. Used as a context; leaving it takes the bar away."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._on_terminal = sys.stderr.isatty()
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._on_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal:
            self._bar.stop()

    def stage(self, name: str, num_bytes: int | None = None) -> None:
        """See Progress."""
        if not self._on_terminal:
            log.info(name, **({} if num_bytes is None else {"gib": round(num_bytes / 2**30, 2)}))
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        """See Progress."""
        if self._task is not None:
            self._bar.advance(self._task, num_bytes)
