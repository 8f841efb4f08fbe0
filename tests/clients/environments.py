"""Where clients are installed that cannot share Baton's environment: what they need contradicts what it needs."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAMS = FOLDER / "programs"

_OWN = FOLDER.parents[1] / ".venv" / "clients"  # made by the Makefile, from requirements.txt
_PACKAGES = ("package.json", "package-lock.json")


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


def python() -> Path | None:
    """The interpreter of the clients' environment, where that is complete."""
    return _OWN / "bin" / "python" if (_OWN / ".installed").exists() else None


def find_node(cache: Path) -> Node | None:
    """The one on PATH; its packages are installed below `cache`, once for each version of them."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    digest = hashlib.sha256(b"".join((FOLDER / "node" / name).read_bytes() for name in _PACKAGES)).hexdigest()
    home = cache / f"node-{digest[:16]}"
    if not home.exists():
        _install(npm, home)
    return Node(node, home)


def _install(npm: str, home: Path) -> None:
    """Installs beside `home` and moves it there: another test process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=home.parent) as made:
        for name in _PACKAGES:
            shutil.copyfile(FOLDER / "node" / name, Path(made) / name)
        command = [npm, "ci", "--prefix", made, "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, check=True, timeout=600)
        with suppress(OSError):  # it is there by now
            os.rename(made, home)
        Path(made).mkdir(exist_ok=True)  # for its removal
    assert home.exists()
