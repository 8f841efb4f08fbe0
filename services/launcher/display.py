"""The output of `baton up`: progress while it loads, and one line for each thing worth knowing.

Progress and the children's lines go to stderr, the banner (`banner.py`) to stdout. On a terminal a spinner turns for
each child that loads; elsewhere there are plain lines only.
"""

import json
import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from services.config import LogFormat

_STAMP = re.compile(r"^\S+Z \[\w+ *\] +")  # before the words of a log line


class _Levels(RegexHighlighter):
    """Colours the level of a child's log line; nothing where there is no colour."""

    highlights: ClassVar[list[str]] = [
        r"\[(?P<green>info) *\]",
        r"\[(?P<yellow>warning) *\]",
        r"\[(?P<red>error|critical) *\]",
    ]


class Display:
    """Listens to supervisors and prints. Used as a context; leaving it takes the spinners away."""

    def __init__(self, log_format: LogFormat) -> None:
        self._json = log_format is LogFormat.JSON
        on_terminal = sys.stderr.isatty()  # which breaks lines at words; elsewhere a line is a line
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=not on_terminal)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, and with it the spinners
            self._stop_spinners()

    def starting(self, name: str, what: str) -> None:
        """Shows that something began which may take a while."""
        if self._console.is_terminal:
            self._progress.start()
            self._tasks[name] = self._progress.add_task(f"{name}: {what}", total=None)
        else:
            self.say(f"{name}: {what}")

    def finished(self, name: str) -> None:
        """Shows that the thing which `starting` announced is over."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self._stop_spinners()

    def loading(self, name: str, line: str) -> None:
        """Shows the last line of a child that loads, beside its spinner."""
        task = self._tasks.get(name)
        if task is not None and line.strip():
            self._progress.update(task, description=f"{name}: {_words(line)[:100]}")

    def ready(self, name: str, seconds: float) -> None:
        """Prints one line for a child that serves now."""
        self.finished(name)
        self.say(f"{name} is ready ({seconds:.1f} s)")

    def line(self, name: str, line: str) -> None:
        """Prints a child's own line, with the child's name in front; JSON lines stay as they are."""
        if self._json:
            self._console.print(line, soft_wrap=True)
        else:
            self._console.print(_Levels()(Text(f"{name} | {line}")))

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        """Prints one line for a child's death and its restart."""
        self.say(f"{name} died ({how}); starting it again in {restart_in_s:.1f} s")

    def say(self, text: str) -> None:
        """Prints one line of the launcher's own."""
        self._console.print(f"baton: {text}")

    def _stop_spinners(self) -> None:
        """Ends the spinners, so that nothing is drawn again while nothing loads."""
        if self._progress.live.is_started:
            self._progress.stop()


def _words(line: str) -> str:
    """Returns the words of a child's log line, without its time and level."""
    if line.startswith("{"):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["event"])
    return _STAMP.sub("", line.strip())
