"""A command that the launcher carries out, in a thread beside the application, since its answer is waited for."""

from collections.abc import Callable, Iterator
from typing import Any

from textual.app import App

from services.config.option import Refusal
from services.top.commands import Launcher


class LauncherCommand:
    """The command that is under way; there is one at most."""

    def __init__(self, app: App[Any], note: Callable[[str, str], None]) -> None:
        """note: called in the application's thread with a command's name and a line of its answer."""
        self._app = app
        self._note = note
        self._under_way: tuple[str, Launcher] | None = None
        self._has_ended = False

    @property
    def name(self) -> str | None:
        """Returns the name of the command that is under way; None: there is none."""
        return None if self._under_way is None else self._under_way[0]

    def begin(self, name: str, launcher: Launcher, ask: Callable[[], Iterator[str]]) -> None:
        """Asks the launcher to carry out a command, and notes each line of its answer."""

        def note(line: str) -> None:
            self._in_application(lambda: self._note(name, line))

        self._start(name, launcher, lambda: self._listen(name, ask, note))

    def ask(self, name: str, launcher: Launcher, ask: Callable[[], Iterator[str]], take: Callable[[str], None]) -> None:
        """Asks the launcher for something. take: called in the application's thread with the last line of its answer,
        if there is one.
        """

        def work() -> None:
            lines: list[str] = []
            self._listen(name, ask, lines.append)
            if lines:
                self._in_application(lambda: take(lines[-1]))

        self._start(name, launcher, work)

    def leave(self) -> None:
        """Leaves the command that is under way when the application ends, so that no thread waits for it."""
        self._has_ended = True
        if self._under_way is not None:
            self._under_way[1].leave()

    def _start(self, name: str, launcher: Launcher, work: Callable[[], None]) -> None:
        self._under_way = name, launcher
        self._app.run_worker(work, thread=True, group="launcher")

    def _listen(self, name: str, ask: Callable[[], Iterator[str]], take: Callable[[str], None]) -> None:
        """Takes each line of the launcher's answer, and notes a refusal; blocks."""
        try:
            for line in ask():
                take(line)
        except Refusal as refusal:
            words = str(refusal)
            self._in_application(lambda: self._note(name, words))
        finally:
            self._under_way = None

    def _in_application(self, work: Callable[[], None]) -> None:
        """Does something in the application's thread, while there is an application."""
        if not self._has_ended:
            self._app.call_from_thread(work)
