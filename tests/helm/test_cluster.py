"""helm installs the chart, and kubectl applies it, at a mock API server: as near to a cluster as a test can come."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients import environments
from tests.helm.chart import CHART, CPU, EVERYTHING, ROOT, Helm, Manifest, arguments_of, of_kind
from tests.helm.test_chart import CUSTOM_RESOURCES
from tests.machine import miss

PLURALS = {
    f"{resource.partition(' ')[0]}/{schema['plural']}": resource.partition(" ")[2]
    for resource, schema in CUSTOM_RESOURCES.items()
}


@pytest.fixture(scope="session")
def python() -> Path:
    """An interpreter that has kmock, and kubectl beside it; in continuous integration it must be there."""
    found = environments.python()
    if found is not None:
        return found
    miss("kmock and kubectl are not installed; `make test-clients` does that")


def run(python: Path, program: str, *arguments: object) -> Any:
    command = [str(python), "-m", f"tests.helm.programs.{program}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def named(manifests: list[Manifest]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in manifests}


@pytest.mark.parametrize("case", [CPU, EVERYTHING], ids=lambda case: case.stem)
def test_kubectl_finds_every_kind_and_creates_it_once(helm: Helm, python: Path, tmp_path: Path, case: Path):
    """Two cases have all kinds between them."""
    manifests = helm.render(case)
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    result = run(python, "apply", file, json.dumps(PLURALS))
    assert named(result["kept"]) == named(manifests)
    assert len(result["first"]) == len(manifests)
    assert all(line.endswith(" created") for line in result["first"])
    assert not [line for line in result["second"] if line.endswith(" created")]


def test_an_upgrade_keeps_passwords_and_keys_and_changes_what_it_is_told(helm: Helm, python: Path, tmp_path: Path):
    result = run(python, "install", helm.path, CHART, tmp_path, "logFormat=text")
    before, after = (
        [each for each in kept if "helm.release" not in each["metadata"]["name"]] for kept in result["kept"]
    )
    without_tests = named(helm.render()) - {("Pod", "demo-baton-test")}
    assert named(before) == named(after) == without_tests
    secrets = of_kind(before, "Secret")
    assert {name: each["data"] for name, each in of_kind(after, "Secret").items()} == {
        name: each["data"] for name, each in secrets.items()
    }
    assert "--log-format=json" in arguments_of(before, "gateway")
    assert "--log-format=text" in arguments_of(after, "gateway")
    for said in result["said"]:
        assert "STATUS: deployed" in said
        assert "port-forward service/demo-baton 8000" in said
