"""Every step of the Dockerfile is run, and a chat is sent to the result: as its user, on a read-only root.

Debian's own Python stands for the base image. It takes minutes, root and the network, so `make test` does not collect
it; `make test-image` does.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.stack import Endpoint, wait_until
from tests.image.build import Build, Image
from tests.image.container import Container

_LISTED = "import importlib.metadata as m; print(*(d.metadata['name'] for d in m.distributions()))"


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def image(build: Build, request: pytest.FixtureRequest) -> Image:
    """torch comes from where pip finds it on this machine: for cuda too, that may be its build for CPUs."""
    return build.stage(request.param, {"TORCH_INDEX": "", "REVISION": "0" * 40})


@pytest.fixture(scope="module")
def container(image: Image, volumes: Path) -> Container:
    return Container(image, volumes / image.root.name)


def test_a_chat_is_answered_by_what_writes_to_its_volumes_alone(container: Container):
    gateway = Endpoint()
    options = ["--port", str(gateway.port), "--grpc-port", str(gateway.grpc_port), "--kv-memory", "64MiB"]
    options += ["--handoff", "always"]
    with container.running("up", *options) as process, gateway.client as client:
        wait_until(
            lambda: process.poll() is not None or gateway.get("/ready")[0] == 200, 600, "a gateway that is ready"
        )
        (model,) = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, timeout=120
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens
    assert process.returncode == 0
    kept = container.files("/var/cache/baton")
    assert [name for name in kept if name.startswith("baton/kernels/")]


def test_the_bill_of_materials_names_what_is_installed_and_nothing_else(container: Container):
    components = json.loads(container.output_of("cat", "/opt/baton/sbom.json"))["components"]
    assert {each["name"] for each in components} == set(container.output_of("python", "-c", _LISTED).split())
    assert all(each["version"] for each in components)


def test_nothing_that_only_the_build_needs_is_in_the_image(container: Container):
    installed = set(container.output_of("python", "-c", _LISTED).split())
    assert {"baton-serve", "torch"} <= installed
    assert installed.isdisjoint({"pip", "cyclonedx-bom"})
    assert not [name for name in ("src", "wheels", "opt/tools") if (container.image.root / name).exists()]


def test_only_the_image_for_gpus_has_a_compiler(container: Container):
    found = shutil.which("gcc", path=str(container.image.root / "usr/bin")) is not None
    assert found == (container.image.root.name == "cuda")


def test_its_user_owns_nothing_but_the_caches(container: Container):
    assert container.output_of("id", "-u") == "10001\n"
    root = container.image.root
    own = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.lstat().st_uid == 10001)
    assert own == ["var/cache/baton", "var/cache/huggingface"]


def test_its_labels_say_what_it_is_and_of_which_commit(image: Image):
    assert image.labels["org.opencontainers.image.title"] == "Baton"
    assert image.labels["org.opencontainers.image.revision"] == "0" * 40
