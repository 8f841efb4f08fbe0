"""The Dockerfile as its stages and their instructions, and what .dockerignore lets through."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)", re.DOTALL)
_FROM = re.compile(r"(?P<base>\S+) AS (?P<name>\S+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name, and what follows in one line."""

    name: str
    value: str

    def words(self) -> list[str]:
        """Returns the words of its JSON form. Raises ValueError for another form."""
        words: list[str] = json.loads(self.value)
        return words


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, as `FROM base AS name` begins it."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all_of(self, name: str) -> list[str]:
        """Returns the values of its instructions of this name, in order."""
        return [each.value for each in self.instructions if each.name == name]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """Arguments before the first stage, and stages by name, in order."""

    arguments: tuple[Instruction, ...]
    stages: dict[str, Stage]

    def chain(self, name: str) -> list[Stage]:
        """Returns a stage and the stages that it is built on, the first one first."""
        chain = [self.stages[name]]
        while (below := self.stages.get(chain[0].base)) is not None:
            chain.insert(0, below)
        return chain


def read_dockerfile(path: Path = ROOT / "Dockerfile") -> Dockerfile:
    """Reads a Dockerfile whose stages all have names. Raises ValueError where it is none."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    before: list[Instruction] = []
    stages: list[tuple[str, str, list[Instruction]]] = []
    for statement in re.sub(r"\\\n\s*", "", "\n".join(lines)).split("\n"):
        found = _INSTRUCTION.fullmatch(statement)
        if found is None:
            raise ValueError(f"no instruction: {statement}")
        name, value = found.groups()
        if name == "FROM":
            if (stage := _FROM.fullmatch(value)) is None:
                raise ValueError(f"a stage without a name: {statement}")
            stages.append((stage["name"], stage["base"], []))
        else:
            (stages[-1][2] if stages else before).append(Instruction(name, value))
    named = {name: Stage(name, base, tuple(instructions)) for name, base, instructions in stages}
    return Dockerfile(tuple(before), named)


class Context:
    """The files that an engine is sent: those of the repository that .dockerignore lets through."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        lines = (root / ".dockerignore").read_text().splitlines()
        self._rules = [_rule(line) for line in lines if line and not line.startswith("#")]

    def files(self, source: str) -> list[Path]:
        """Returns the files of a file or folder, from the repository on. Raises FileNotFoundError if none is sent."""
        below = self.root / source
        found = [below] if below.is_file() else [path for path in sorted(below.rglob("*")) if path.is_file()]
        sent = [path.relative_to(self.root) for path in found if self._is_sent(path.relative_to(self.root))]
        if not sent:
            raise FileNotFoundError(f"{source}: no such file is sent to the engine")
        return sent

    def _is_sent(self, path: Path) -> bool:
        """The last rule that fits the path, or a folder that it is in, decides."""
        names = [each.as_posix() for each in (path, *path.parents)]
        fitting = [sent for pattern, sent in self._rules if any(pattern.fullmatch(name) for name in names)]
        return fitting[-1] if fitting else True


def _rule(line: str) -> tuple[re.Pattern[str], bool]:
    """A pattern, and whether what fits it is sent."""
    pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.compile(pattern), line.startswith("!")
