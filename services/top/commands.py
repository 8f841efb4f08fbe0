"""Commands that `baton top` gives to the fleet. Whoever starts it says how."""

from collections.abc import Iterator, Mapping
from typing import Protocol


class Launcher(Protocol):
    """The `baton up` that started the gateway."""

    def restart(self) -> Iterator[str]:
        """Replaces every process, and yields a line for each; blocks in between. Raises Refusal."""

    def scale(self, numbers: Mapping[str, int]) -> Iterator[str]:
        """Starts or ends workers, and yields a line for each; blocks in between. Raises Refusal.

        numbers: of its own workers, by role. Where there are none nothing changes. The last line says which there are.
        """

    def leave(self) -> None:
        """Ends the command that is under way, from another thread. What it has done stays."""


class Commands(Protocol):
    """The ways to change a fleet."""

    async def drain(self, worker: str) -> str:
        """Drains the worker at host:port, and says in a line what came of it. Raises Refusal."""

    def launcher_of(self, gateway_pid: int) -> Launcher | None:
        """Finds the `baton up` of this user on this machine that runs a gateway's process; None: there is none."""
