"""What an engine does with the Dockerfile, in folders in the place of layers.

An instruction that is not known here is refused: the test then says nothing about it.
"""

import shlex
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from tests.image.dockerfile import Context, Dockerfile, Instruction, Stage
from tests.image.pip_settings import PipSettings
from tests.image.roots import copy_root, run_in

_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """A root, and how a container of it is started."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    labels: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    volumes: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()


class Build:
    """Builds stages, each once."""

    def __init__(self, dockerfile: Dockerfile, base: Path, directory: Path, settings: PipSettings) -> None:
        """base: the root that stands for the base image, left as it is. directory: for the roots of the stages."""
        self._dockerfile = dockerfile
        self._base = base
        self._directory = directory
        self._settings = settings
        self._context = Context()
        self._built: dict[str, Image] = {}

    def stage(self, name: str, arguments: Mapping[str, str]) -> Image:
        """Builds a stage and those that it needs. arguments: in the place of those of the Dockerfile."""
        if name not in self._built:
            self._built[name] = self._run(self._dockerfile.stages[name], arguments)
        return self._built[name]

    def _run(self, stage: Stage, arguments: Mapping[str, str]) -> Image:
        root = self._directory / stage.name
        if stage.base in self._dockerfile.stages:
            below = self.stage(stage.base, arguments)
        else:
            assert stage.base == "${BASE}", f"{stage.name} is built on {stage.base}"
            below = Image(self._base)
        copy_root(below.root, root)
        image, values = replace(below, root=root), dict[str, str]()
        for each in stage.instructions:
            image = self._step(each, image, values, arguments)
        return image

    def _step(self, step: Instruction, image: Image, values: dict[str, str], arguments: Mapping[str, str]) -> Image:
        """Carries out an instruction. values: the arguments of the stage so far."""
        known = {**values, **image.environment}
        match step.name:
            case "ARG":
                name, _, default = step.value.partition("=")
                values[name] = arguments.get(name, default.strip('"'))
            case "ENV":
                return replace(image, environment={**image.environment, **_pairs(step, known)})
            case "LABEL":
                return replace(image, labels={**image.labels, **_pairs(step, known)})
            case "WORKDIR":
                (image.root / step.value.lstrip("/")).mkdir(parents=True, exist_ok=True)
                return replace(image, workdir=step.value)
            case "COPY":
                self._copy(shlex.split(step.value), image, arguments)
            case "RUN":
                command = ["/bin/sh", "-ec", f"cd {image.workdir}; {step.value}"]
                run_in(image.root, command, self._settings, known)
            case "USER":
                return replace(image, user=step.value)
            case "VOLUME":
                return replace(image, volumes=(*image.volumes, *step.words()))
            case "ENTRYPOINT":
                return replace(image, entrypoint=tuple(step.words()))
            case "EXPOSE":
                """Nothing but a note."""
            case _:
                raise ValueError(f"{step.name} is not known here")
        return image

    def _copy(self, words: list[str], image: Image, arguments: Mapping[str, str]) -> None:
        target = image.root / str(PurePosixPath(image.workdir) / words[-1]).lstrip("/")
        if words[0].startswith("--from="):
            other = self.stage(words[0].removeprefix("--from="), arguments).root
            for source in words[1:-1]:
                shutil.copytree(other / source.lstrip("/"), target, symlinks=True, dirs_exist_ok=True)
            return
        for source in words[:-1]:
            for path in self._context.files(source):
                inside = path.relative_to(source) if path != Path(source) else Path(path.name)
                place = target / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(self._context.root) / path, place)


def _pairs(step: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    """Names and values of ENV and LABEL."""
    words = [word.partition("=") for word in shlex.split(step.value)]
    return {name: string.Template(value).substitute(known) for name, _, value in words}
