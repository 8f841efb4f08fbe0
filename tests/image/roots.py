"""A Debian system in a folder, and commands in it, each in a namespace of mounts of its own."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.image.pip_settings import PipSettings

_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"
_PACKAGES = ("ca-certificates", "python3", "python3-venv")


@dataclass(frozen=True, slots=True)
class Mounts:
    """What is mounted for one command, beside /proc, /dev and /sys."""

    read_only: Sequence[Path] = ()  # folders and files of this machine, in the same place
    writable: Mapping[str, Path] = field(default_factory=dict)  # folders of this machine, by their place in the root
    read_only_root: bool = False


def make_base(root: Path) -> None:
    """Makes what stands for the base image: Debian with its own Python under the names that the image has."""
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(root), _MIRROR]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    for name in ("python", "python3"):
        (root / "usr/local/bin" / name).symlink_to("/usr/bin/python3")


def copy_root(source: Path, target: Path) -> None:
    """Copies a root with its owners and modes."""
    subprocess.run(["cp", "--archive", "--reflink=auto", str(source), str(target)], check=True, timeout=300)


def command_in(root: Path, command: Sequence[str], mounts: Mounts, environment: Mapping[str, str]) -> list[str]:
    """Returns the command that runs another one in a root. Its mounts end with it."""
    here = shlex.quote(str(root))
    script = [f"mount --bind {here} {here}"]
    script += [f"mount -o remount,bind,ro {here}"] if mounts.read_only_root else []
    script += [f"cd {here}", "mount -t proc proc proc", "mount --rbind /dev dev", "mount --rbind -o ro /sys sys"]
    script += [shlex.join(["mount", "--bind", str(source), f".{place}"]) for place, source in mounts.writable.items()]
    script += [shlex.join(["mount", "--bind", "-o", "ro", str(path), f".{path}"]) for path in mounts.read_only]
    variables = [f"{name}={value}" for name, value in environment.items()]
    script.append("exec " + shlex.join(["env", "-i", *variables, "chroot", ".", *command]))
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(script)]


def run_in(root: Path, command: Sequence[str], settings: PipSettings, environment: Mapping[str, str]) -> None:
    """Runs a step of the build as root, with the network and what pip needs of this machine.

    Raises CalledProcessError where it fails.
    """
    places = [place for path in settings.paths for place in _make_place(root, path)]
    wrapped = command_in(root, command, Mounts(settings.paths), {**settings.environment, **environment})
    try:
        subprocess.run(wrapped, check=True, timeout=1800)
    finally:
        for place in reversed(places):
            place.unlink() if place.is_file() else place.rmdir()


def _make_place(root: Path, path: Path) -> list[Path]:
    """Makes the place at which something is mounted; returns what was not there before, the outermost first."""
    place = root / path.relative_to("/")
    missing = [each for each in (place, *place.parents) if not each.exists()][::-1]
    if path.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(exist_ok=True)
    return missing


def missing_tools() -> list[str]:
    """Returns what this machine lacks to run a build like this."""
    missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    return missing + ([] if os.geteuid() == 0 else ["root"])
