"""How pip is configured on this machine, for a pip that runs in another root."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PipSettings:
    """Variables of the environment, and what they name on this machine's disk."""

    environment: dict[str, str]
    paths: tuple[Path, ...]


def read_pip_settings() -> PipSettings:
    """Asks pip, which knows its files and variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    values: dict[str, str] = {}
    for line in listed.splitlines():  # variables, which win, come before the files' lines
        name, _, value = line.partition("=")
        values.setdefault(name.rpartition(".")[2], value.strip("'\""))
    environment = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in values.items()}
    words = [word for value in values.values() for word in value.split()]
    return PipSettings(environment, tuple(sorted({path for word in words for path in _on_disk(word)})))


def _on_disk(word: str) -> list[Path]:
    """A path, or the folder that an index lies in beside its files."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return []
    return [path.parent if word.startswith("file://") else path]
