"""Where a client runs: in a home and a folder of its own, with no variable of ours but PATH."""

import base64
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# One pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Place:
    """A home and a folder to work in."""

    home: Path
    work: Path

    def run(
        self, *command: str, variables: Mapping[str, str] | None = None, enter: Callable[[], None] | None = None
    ) -> str:
        """Runs a client to its end. Returns what it printed, which is also a failure's text.

        variables: all that there are but PATH and HOME. enter: takes the process into its network.
        """
        result = subprocess.run(
            command,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **(variables or {})},
            cwd=self.work,
            preexec_fn=enter,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return result.stdout

    def write(self, name: str, content: str | bytes) -> Path:
        """Writes a file to work with."""
        path = self.work / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def read(self, name: str) -> str:
        """Reads what a client wrote."""
        return (self.work / name).read_text()


def make_place(folder: Path) -> Place:
    """Makes both folders."""
    place = Place(folder / "home", folder / "work")
    place.home.mkdir()
    place.work.mkdir()
    return place
