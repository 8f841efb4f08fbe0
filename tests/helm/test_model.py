"""The Job that fills a volume with a model from the hub, run as a process against a hub of the tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.models import find_model
from tests.cli.hub_server import TOKEN, Hub, Repository, serving
from tests.cli.test_hub import TEXTS, write_repository
from tests.helm.chart import Helm, Manifest, of_kind, pod_of, workload
from tests.helm.kubelet import Container, Node, Program

WEIGHTS = {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}
ELSEWHERE = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "README.md"]
ID = "org/gated"


@pytest.fixture(scope="module")
def local_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    directory = tmp_path_factory.mktemp("hub")
    model = write_repository(directory / "model", *WEIGHTS, *ELSEWHERE, "chat_template.jinja")
    with serving({ID: Repository(model, gated=True)}) as running:
        yield running


def render(helm: Helm, volume: Path, endpoint: str, *settings: str) -> list[Manifest]:
    own = {
        "model.hub.id": ID,
        "model.hub.tokenSecret": "hub",
        "model.hub.extraEnv[0].name": "HF_ENDPOINT",
        "model.hub.extraEnv[0].value": endpoint,
        "model.cache.size": "20Gi",
        "model.mountPath": volume,
    }
    return helm.render(None, "--set", ",".join([*(f"{key}={value}" for key, value in own.items()), *settings]))


def run_job(manifests: list[Manifest], directory: Path) -> int:
    """Its exit code."""
    job = Container(Node(manifests, directory, {"hub": {"token": TOKEN.encode()}}), "model")
    assert isinstance(job.process, Program)
    code = job.process.wait(120)
    assert code is not None
    return code


def waits(manifests: list[Manifest]) -> bool:
    """True when the pods of a worker do not go on after a moment."""
    (container,) = pod_of(workload(manifests, "decode"))["initContainers"]
    try:
        subprocess.run([*container["command"], *container["args"]], timeout=0.5, check=True)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_the_job_fetches_what_baton_reads_once_and_pods_wait_for_it(helm: Helm, local_hub: Hub, tmp_path: Path):
    volume = tmp_path / "volume"
    volume.mkdir()
    manifests = render(helm, volume, local_hub.url)
    assert waits(manifests)
    assert run_job(manifests, tmp_path / "first") == 0
    assert not waits(manifests)
    directory = volume / ID / "main"
    assert {path.name for path in directory.iterdir() if path.is_file()} == TEXTS | WEIGHTS | {".whole"}
    model, _ = find_model(str(directory), None)
    assert model == directory
    assert f"--model={directory}" in pod_of(workload(manifests, "decode"))["containers"][0]["args"]
    local_hub.taken.clear()
    assert run_job(manifests, tmp_path / "second") == 0
    assert local_hub.taken == []


def test_a_job_that_fails_leaves_pods_waiting(helm: Helm, local_hub: Hub, tmp_path: Path):
    manifests = render(helm, tmp_path, local_hub.url, "model.hub.revision=v9")
    assert run_job(manifests, tmp_path / "job") != 0
    assert waits(manifests)


def test_another_revision_is_another_job(helm: Helm, tmp_path: Path):
    (first,), (second,) = (
        of_kind(render(helm, tmp_path, "http://hub", f"model.hub.revision={revision}"), "Job") for revision in "ab"
    )
    assert first != second
