"""What the chart renders: valid, hardened, consistent, and nothing that is accepted and ignored."""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.config import Dtype, HandoffMode, LogFormat, TransportName
from tests.helm.chart import CASES, CHART, Helm, Manifest, Refused, containers, deployment, of_kind

TUNED = CHART / "ci" / "tuned-values.yaml"
GPU = CHART / "ci" / "gpu-values.yaml"
EXTERNAL_REDIS = CHART / "ci" / "external-redis-values.yaml"
OLDEST, NEWEST = "1.25", kubernetes_validate.latest_version()

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem if case else "defaults")


@each_case
def test_lint_has_nothing_to_say(helm: Helm, case: Path | None):
    helm.lint(case)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_everything_that_is_rendered(helm: Helm, version: str):
    """By kind, as lists: the schemas are read anew for every document that is validated."""
    manifests = [manifest for case in CASES for manifest in helm.render(case)]
    for api_version, kind in {(manifest["apiVersion"], manifest["kind"]) for manifest in manifests}:
        items = [manifest for manifest in manifests if manifest["kind"] == kind]
        every = {"apiVersion": api_version, "kind": f"{kind}List", "metadata": {}, "items": items}
        kubernetes_validate.validate(every, version, strict=True)


def test_a_mistake_in_what_is_rendered_would_be_found(helm: Helm):
    mistaken = deployment(helm.render(), "gateway")
    mistaken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    every = {"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {}, "items": [mistaken]}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(every, NEWEST, strict=True)


@each_case
def test_every_container_runs_without_rights(helm: Helm, case: Path | None):
    for pod, container in containers(helm.render(case)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


@each_case
def test_probes_services_and_policies_name_ports_that_containers_open(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    for _, container in containers(manifests):
        opened = {port["name"] for port in container["ports"]} | {port["containerPort"] for port in container["ports"]}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert "livenessProbe" in container
        assert "readinessProbe" in container
        for action in (probe.get("httpGet") or probe.get("grpc") for probe in probes):
            assert action is None or action["port"] in opened  # None: a command
    for service in of_kind(manifests, "Service").values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named_ports(manifests, service["spec"]["selector"])
    for policy in of_kind(manifests, "NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                assert port["port"] in named_ports(manifests, policy["spec"]["podSelector"]["matchLabels"])


def named_ports(manifests: list[Manifest], selector: dict[str, str]) -> set[str]:
    """Of all pods that the selector finds, of which there must be some."""
    templates = [each["spec"]["template"] for each in of_kind(manifests, "Deployment").values()]
    found = [template for template in templates if selector.items() <= template["metadata"]["labels"].items()]
    assert found
    return {port["name"] for pod in found for container in pod["spec"]["containers"] for port in container["ports"]}


@each_case
def test_selectors_find_one_component_each(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    deployments = of_kind(manifests, "Deployment")
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in deployments.items()}

    def selected(selector: dict[str, str]) -> list[str]:
        return [name for name in labels if selector.items() <= labels[name].items()]

    for name, each in deployments.items():
        assert selected(each["spec"]["selector"]["matchLabels"]) == [name]
    budgets = [each["spec"]["selector"]["matchLabels"] for each in of_kind(manifests, "PodDisruptionBudget").values()]
    assert [len(selected(budget)) for budget in budgets] == [1, 1, 1]


def test_only_gateways_and_workers_reach_workers(helm: Helm):
    policy = of_kind(helm.render(), "NetworkPolicy")["demo-baton-workers"]["spec"]
    from_gateways, from_workers = policy["ingress"]
    (gateways,) = from_gateways["from"]
    assert gateways["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert from_workers == {"from": [{"podSelector": policy["podSelector"]}]}
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
    (expression,) = policy["podSelector"]["matchExpressions"]
    assert expression["values"] == ["prefill", "decode"]


def test_secrets_stay_out_of_command_lines(helm: Helm):
    manifests = helm.render()
    secret = of_kind(manifests, "Secret")["demo-baton-redis"]["data"]["password"]
    assert len(secret) >= 32
    for _, container in containers(manifests):
        assert "PASSWORD" not in json.dumps([container.get("command"), container["args"]])
        assert "BATON_REDIS_URL" not in json.dumps(container["args"])
    assert json.dumps(manifests).count(secret) == 1


def test_with_a_redis_of_ones_own_there_is_none_and_its_url_is_a_secret(helm: Helm):
    manifests = helm.render(EXTERNAL_REDIS)
    assert {container["name"] for _, container in containers(manifests)} == {"gateway", "prefill", "decode"}
    assert secrets_named(manifests) == [{"name": "redis-url", "key": "url"}] * 3
    assert not of_kind(manifests, "Secret")


def test_a_password_of_ones_own_replaces_the_charts(helm: Helm):
    manifests = helm.render(TUNED)
    assert secrets_named(manifests) == [{"name": "redis-password", "key": "password"}] * 4
    assert not of_kind(manifests, "Secret")


def secrets_named(manifests: list[Manifest]) -> list[dict[str, str]]:
    """By the containers' environment."""
    sources = [env.get("valueFrom", {}) for _, container in containers(manifests) for env in container["env"]]
    return [source["secretKeyRef"] for source in sources if "secretKeyRef" in source]


def test_an_update_never_takes_the_last_pod(helm: Helm):
    for component in ("gateway", "prefill", "decode"):
        assert deployment(helm.render(), component)["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_a_gateway_that_ends_has_time_for_the_delay_and_for_answers_in_progress(helm: Helm):
    gateway = deployment(helm.render(TUNED), "gateway")["spec"]["template"]["spec"]
    assert gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert gateway["terminationGracePeriodSeconds"] > 20 + 30
    worker = deployment(helm.render(TUNED), "decode")["spec"]["template"]["spec"]
    assert worker["terminationGracePeriodSeconds"] > 30


def test_a_worker_gets_the_time_to_load_its_model(helm: Helm):
    worker = deployment(helm.render(TUNED), "decode")["spec"]
    startup = worker["template"]["spec"]["containers"][0]["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 1200
    assert worker["progressDeadlineSeconds"] > 1200


def test_a_worker_on_a_gpu_may_choose_its_kv_memory(helm: Helm):
    for role in ("prefill", "decode"):
        (worker,) = deployment(helm.render(GPU), role)["spec"]["template"]["spec"]["containers"]
        assert not [argument for argument in worker["args"] if "kv-memory" in argument]
        assert {"--device=cuda", "--kv-cache-dtype=fp8"} <= set(worker["args"])
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_without_network_policies_there_are_none(helm: Helm):
    assert not of_kind(helm.render(TUNED), "NetworkPolicy")


def test_every_wrong_value_is_refused_by_name(helm: Helm):
    wrong = [
        "replicas=2",
        "gateway.replica=2",
        "decode.resources.memory=1Gi",
        "redis.image.tags=7",
        "prefill.port=http",
        "decode.port=80",
        "decode.kvMemory=4 GB RAM",
        "workers.transport=carrier-pigeon",
        "gateway.extraArgs=--verbose",
        "runAsUser=0",
        "model.path=Qwen3-0.6B",
    ]
    with pytest.raises(Refused) as refused:
        helm.render(None, "--set", ",".join(wrong))
    for setting in wrong:  # the path is on one line, however this version of helm writes it
        assert re.search(setting.partition("=")[0].replace(".", ".*"), str(refused.value))


@pytest.mark.parametrize(
    ("setting", "culprit"),
    [
        ("redis.enabled=false", "redis.urlSecret must name a Secret"),
        ("model.existingClaim=", "model.existingClaim or model.hostPath must be set"),
        ("allowPlaintext=false", "there is no TLS between services yet"),
    ],
)
def test_what_cannot_work_is_refused_in_words(helm: Helm, setting: str, culprit: str):
    with pytest.raises(Refused, match=culprit):
        helm.render(None, "--set", setting)


def test_choices_are_those_of_the_processes():
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    workers = properties["workers"]["properties"]
    assert workers["transport"]["enum"] == list(TransportName)
    assert workers["dtype"]["enum"] == list(Dtype)
    assert properties["gateway"]["properties"]["handoff"]["enum"] == list(HandoffMode)
    assert set(properties["logFormat"]["enum"]) == set(LogFormat)


CHOICES = {"image.pullPolicy", "logFormat", "gateway.handoff", "gateway.service.type", "workers.transport"}
CHOICES |= {"workers.dtype", "redis.image.pullPolicy"}
FORMS: dict[str, Any] = {
    "model.path": "/{}",
    "model.mountPath": "/{}",
    "model.hostPath": "/{}",
    "prefill.kvMemory": "{}MiB",
    "decode.kvMemory": "{}MiB",
    "redis.maxMemory": "{}mb",
}


def test_every_value_reaches_what_is_rendered(helm: Helm, tmp_path: Path):
    """Each is given a number of its own, which must come out, with one of the alternatives chosen or with another."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    marks = mark(values, count(20001))
    by_claim = values | {"model": values["model"] | {"hostPath": ""}}
    without_redis = values | {"redis": values["redis"] | {"enabled": False}}
    rendered = ""
    for number, variant in enumerate((values, by_claim, without_redis)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(variant))
        rendered += json.dumps(helm.render(file))
    assert [path for path, number in marks.items() if str(number) not in rendered] == ["workers.startupSeconds"]


def mark(values: dict[str, Any], numbers: Iterator[int], parent: str = "") -> dict[str, int]:
    """Replaces every value that is no choice by a number, in the form that it asks for; returns them by path."""
    marks: dict[str, int] = {}
    for key, value in values.items():
        path = f"{parent}{key}"
        if isinstance(value, dict) and value:
            marks |= mark(value, numbers, f"{path}.")
        elif not isinstance(value, bool) and path not in CHOICES:
            marks[path] = number = next(numbers)
            values[key] = marked(path, value, number)
    return marks


def marked(path: str, value: Any, number: int) -> Any:
    """The number as a value of the same kind."""
    match value:
        case str():
            return FORMS.get(path, "text-{}").format(number)
        case int() | None:
            return number
        case dict():
            return {"key": f"text-{number}"}
        case _ if path.endswith(".extraArgs"):
            return [f"--option={number}"]
        case _ if path.endswith(".extraEnv"):
            return [{"name": "VARIABLE", "value": f"text-{number}"}]
        case _:
            return [{"name": f"text-{number}"}]


def test_choices_reach_what_is_rendered(helm: Helm):
    by_name = {container["name"]: container for _, container in containers(helm.render(TUNED))}
    assert {"--handoff=auto", "--log-format=text"} <= set(by_name["gateway"]["args"])
    for role in ("prefill", "decode"):
        assert {"--transport=nixl", "--dtype=bfloat16", "--log-format=text"} <= set(by_name[role]["args"])
        assert by_name[role]["imagePullPolicy"] == "Always"
    assert of_kind(helm.render(EXTERNAL_REDIS), "Service")["demo-baton"]["spec"]["type"] == "LoadBalancer"


def test_further_variables_come_after_those_of_the_chart(helm: Helm):
    by_name = {container["name"]: container for _, container in containers(helm.render(TUNED))}
    assert [each["name"] for each in by_name["gateway"]["env"]][-3:] == [
        "BATON_REDIS_URL",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "NODE_NAME",
    ]
    for role in ("prefill", "decode"):
        assert by_name[role]["env"][-1] == {"name": "UCX_TLS", "value": "rc,tcp"}
