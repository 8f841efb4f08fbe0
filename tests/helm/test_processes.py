"""The rendered containers, run as processes of this machine: they find each other, serve, and end when told."""

import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import clear_prompt, generate, write_model
from tests.e2e.forked import BatonProcess
from tests.e2e.test_pair import GREEDY, text_of
from tests.helm.chart import Helm
from tests.helm.kubelet import SERVICE_IP, Node
from tests.helm.release import COMPONENTS, Release, choose_ports, running, settings

NUM_TOKENS = 12
REFUSED = openai.AuthenticationError
SECRET, KEY = "demo-baton-api-key", "key"


@contextmanager
def serving(
    helm: Helm, tmp_path: Path, decode_pods: int = 1, **others: object
) -> Iterator[tuple[Release, dict[str, int]]]:
    """A release of a tiny model, which has handed over a request, and its ports."""
    model = write_model(tmp_path / "tiny", "llama")
    prompt = clear_prompt(model, 5, 100, NUM_TOKENS)
    expected = text_of(model, generate(model, prompt, NUM_TOKENS).tokens)
    ports = choose_ports()
    node = Node(helm.render(None, *settings(model, ports, **others)), tmp_path / "node")
    admin_url = f"http://{SERVICE_IP}:{ports['gateway.adminPort']}"
    with running(node, decode_pods) as release:
        with openai.OpenAI(base_url=url_of(ports), api_key=node.secret(SECRET, KEY), max_retries=0) as client:
            for _ in range(6):  # where the machine stalls for seconds, decode serves alone for a moment
                answer = client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
                assert answer.choices[0].text.rstrip("\ufffd") == expected
                if num_handed_off(admin_url):
                    break
                time.sleep(2)
        assert num_handed_off(admin_url)
        yield release, ports


def url_of(ports: dict[str, int]) -> str:
    return f"http://{SERVICE_IP}:{ports['gateway.port']}/v1"


@pytest.mark.long
def test_what_is_rendered_serves_a_request_and_ends_when_told(helm: Helm, tmp_path: Path):
    with serving(helm, tmp_path) as (release, ports):
        assert models_over_grpc(ports["gateway.grpcPort"], release.node.secret(SECRET, KEY)) == ["tiny"]
        stranger = openai.OpenAI(base_url=url_of(ports), api_key="a stranger's", max_retries=0)
        with stranger, pytest.raises(REFUSED):
            stranger.models.list()
        assert release.test() == 0
        assert release.end() == [(name, 0) for name in reversed(COMPONENTS)]


@pytest.mark.long
def test_a_worker_of_two_pods_serves_and_ends_as_one(helm: Helm, tmp_path: Path):
    """Kubernetes tells all pods of a group to end at the same time."""
    groups = {"decode__nodesPerWorker": 2, "decode__tensorParallelSize": 2}
    with serving(helm, tmp_path, decode_pods=2, **groups) as (release, _):
        (other,) = release.others
        assert isinstance(other.process, BatonProcess)
        other.process.terminate()
        assert other.passes("readinessProbe"), "it goes on until the first one has drained"
        assert release.pods["decode"].end() == 0
        assert other.process.wait(30) == 0


def num_handed_off(admin_url: str, tls: ssl.SSLContext | None = None) -> float:
    with urllib.request.urlopen(f"{admin_url}/metrics", timeout=60, context=tls) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "baton_handoffs_total" and sample.labels["outcome"] == "completed"
    )


def models_over_grpc(port: int, key: str) -> list[str]:
    with grpc.insecure_channel(f"{SERVICE_IP}:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = [("authorization", f"Bearer {key}")]
        answer = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60, metadata=metadata)
    return [model.id for model in answer.models]
