"""Results of the parts, as they grow: a Markdown table for each, and all of them as JSON."""

import json
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtest.tables import Record, table


@dataclass(slots=True)
class Results:
    """Sections in the order in which parts ended. With `out` they are written there after each."""

    out: Path | None
    about: str  # where it ran, one line
    sections: list[tuple[str, list[Record]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by part

    def add(self, title: str, records: list[Record]) -> None:
        """Prints a part's records, and writes all that there is."""
        sys.stdout.write(f"\n## {title}\n\n{table(records)}")
        sys.stdout.flush()
        self.sections.append((title, records))
        self._write()

    def took(self, name: str, seconds: float) -> None:
        """Notes that a part has ended, and how long it took."""
        self.seconds[name] = seconds
        sys.stdout.write(f"\n{name} took {seconds:.0f} s\n")
        sys.stdout.flush()
        self._write()

    def note(self, text: str) -> None:
        """Adds a line that belongs into no table."""
        sys.stdout.write(f"\n{text}\n")
        sys.stdout.flush()
        self.notes.append(text)
        self._write()

    def _write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        taken = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        lines = ["# The GPU path", "", self.about, "", f"Seconds: {taken or 'none so far'}."]
        for note in self.notes:
            lines += ["", note]
        for title, records in self.sections:
            lines += ["", f"## {title}", "", "```", table(records).rstrip(), "```"]
        (self.out / "gpu.md").write_text("\n".join(lines) + "\n")
        found = {"about": self.about, "seconds": self.seconds, "notes": self.notes, "sections": dict(self.sections)}
        (self.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


def software() -> str:
    """Names the versions of Python and of the libraries on which figures depend."""
    return f"Python {platform.python_version()}, torch {_version('torch')}, triton {_version('triton')}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "is not installed"
