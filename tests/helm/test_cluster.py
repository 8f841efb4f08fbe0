"""kubectl applies what is rendered to an API server that knows its kinds: as near to a cluster as a test can come."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.clients import environments
from tests.helm.chart import CPU, EVERYTHING, Helm
from tests.helm.test_chart import CUSTOM_RESOURCES

APPLY = Path(__file__).parent / "programs" / "apply.py"
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
    missing = "kmock and kubectl are not installed; `make test-clients` does that"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.mark.parametrize("case", [CPU, EVERYTHING], ids=lambda case: case.stem)
def test_kubectl_finds_every_kind_and_creates_it_once(helm: Helm, python: Path, tmp_path: Path, case: Path):
    """Two cases have all kinds between them."""
    manifests = helm.render(case)
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    command = [str(python), str(APPLY), str(file), json.dumps(PLURALS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    assert {(each["kind"], each["metadata"]["name"]) for each in result["kept"]} == names
    assert len(result["first"]) == len(manifests)
    assert all(line.endswith(" created") for line in result["first"])
    assert not [line for line in result["second"] if line.endswith(" created")]
