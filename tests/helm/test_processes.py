"""The rendered containers, run as processes of this machine: they find each other, serve, and end when told."""

import contextlib
import time
import urllib.request
from functools import partial
from pathlib import Path

import grpc
import openai
import psutil
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from loadtest.processes import free_ports
from protos import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import clear_prompt, generate, write_model
from tests.e2e.stack import wait_until
from tests.e2e.test_pair import GREEDY, text_of
from tests.helm.chart import Helm
from tests.helm.kubelet import POD_IP, Container

COMPONENTS = ("redis", "prefill", "decode", "gateway")
NUM_TOKENS = 12
HTTP, GRPC, ADMIN, PREFILL, DECODE, REDIS = PORTS = (
    "gateway.port",
    "gateway.grpcPort",
    "gateway.adminPort",
    "prefill.port",
    "decode.port",
    "redis.port",
)


def test_what_is_rendered_serves_a_request_and_ends_when_told(helm: Helm, tmp_path: Path):
    model = write_model(tmp_path / "tiny", "llama")
    prompt = clear_prompt(model, 5, 100, NUM_TOKENS)
    expected = text_of(model, generate(model, prompt, NUM_TOKENS).tokens)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    manifests = helm.render(None, "--set", ",".join(f"{key}={value}" for key, value in settings(model, ports).items()))
    with contextlib.ExitStack() as stack:
        pods: dict[str, Container] = {}
        for name in COMPONENTS:
            pods[name] = Container(manifests, name)
            stack.callback(pods[name].process.kill)
        for name, pod in pods.items():
            for probe in pod.probes:
                wait_until(partial(pod.passes, probe), 600, f"the {probe} of {name}")

        with openai.OpenAI(base_url=f"http://{POD_IP}:{ports[HTTP]}/v1", api_key="none", max_retries=0) as client:
            for _ in range(6):  # where the machine stalls for seconds, decode serves alone for a moment
                answer = client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
                assert answer.choices[0].text.rstrip("\ufffd") == expected
                if num_handed_off(ports[ADMIN]):
                    break
                time.sleep(2)
        assert num_handed_off(ports[ADMIN])
        assert models_over_grpc(ports[GRPC]) == ["tiny"]
        check_the_password_is_asked_for_and_not_shown(pods["redis"], ports[REDIS])

        for name in reversed(COMPONENTS):
            assert (name, pods[name].end()) == (name, 0)


def settings(model: Path, ports: dict[str, int]) -> dict[str, object]:
    """What makes the chart fit this machine: paths and ports of its own, small workers of one thread."""
    small = {"kvMemory": "16MiB", "resources.limits.cpu": "500m"}
    return {
        "gateway.host": POD_IP,
        "gateway.drainDelaySeconds": 1,
        "gateway.handoff": "always",
        "model.hostPath": model.parent,
        "model.mountPath": model.parent,
        "model.path": model,
        **{f"{role}.{key}": value for role in ("prefill", "decode") for key, value in small.items()},
        "workers.extraArgs[0]": "--device=cpu",
        **ports,
    }


def num_handed_off(port: int) -> float:
    with urllib.request.urlopen(f"http://{POD_IP}:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "baton_handoffs_total" and sample.labels["outcome"] == "completed"
    )


def models_over_grpc(port: int) -> list[str]:
    with grpc.insecure_channel(f"{POD_IP}:{port}") as channel:
        answer = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=60)
    return [model.id for model in answer.models]


def check_the_password_is_asked_for_and_not_shown(pod: Container, port: int) -> None:
    assert pod.environment["REDISCLI_AUTH"] not in " ".join(psutil.Process(pod.process.pid).cmdline())
    with redis.Redis(port=port) as anybody, pytest.raises(redis.AuthenticationError):
        anybody.ping()
