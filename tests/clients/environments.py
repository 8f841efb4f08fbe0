"""Where clients are installed that cannot share Baton's environment: what they need contradicts what it needs.

The Makefile installs them, in the versions that requirements.txt and node/package.json name, or the newest ones.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PROGRAMS = FOLDER / "programs"
NAMED, NEWEST = ROOT / ".venv" / "clients", ROOT / ".venv" / "clients-newest"

PYTHON_VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a list of prices
    "LANGSMITH_TRACING": "false",
    "PYTHONPATH": str(ROOT),
}
_STAMP = ".installed"


@dataclass(frozen=True, slots=True)
class Node:
    """Node, and the folder in which programs find their packages."""

    path: str
    home: Path

    def command(self, name: str) -> list[str]:
        """How a program of node/ is run. Node looks for packages beside a program, so it runs as a copy there."""
        copy = self.home / name
        shutil.copyfile(FOLDER / "node" / name, copy)
        return [self.path, str(copy)]

    def program(self, name: str) -> str:
        """The path of a program that a package brings."""
        return str(self.home / "node_modules" / ".bin" / name)


def python(clients: Path = NAMED) -> Path | None:
    """The interpreter of the clients' environment, where that is complete."""
    return clients / "bin" / "python" if (clients / _STAMP).exists() else None


def node(clients: Path) -> Node | None:
    """The one on PATH, with the packages of clients, where these are complete."""
    path, home = shutil.which("node"), clients.with_name(f"{clients.name}-node")
    return Node(path, home) if path is not None and (home / _STAMP).exists() else None
