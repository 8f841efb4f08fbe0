"""The values: none is without effect, and a wrong one is refused by its name."""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.values_schema import GIVEN_FLAGS, SCHEMA, given_flags, make_schema
from tests.helm.chart import CHART, EVERYTHING, Helm, Manifest, Refused

MAX_LINES = 420


def test_the_schema_and_the_flags_are_those_that_values_and_options_make():
    """`make chart` writes them."""
    assert json.loads(SCHEMA.read_text()) == make_schema()
    assert json.loads(GIVEN_FLAGS.read_text()) == given_flags()


def test_every_wrong_value_is_refused_by_name(helm: Helm):
    wrong = [
        "replicas=2",
        "gateway.replica=2",
        "decode.resources.memory=1Gi",
        "decode.probes.live=1",
        "gateway.service.loadBalancer=internal",
        "gateway.service.sessionAffinity=Cookie",
        "gateway.podDisruptionBudget.minAvailable=1",
        "redis.resources.limits.memory=plenty",
        "model.cache.accessMode=ReadWriteOncePod",
        "redis.image.tags=7",
        "prefill.port=http",
        "decode.port=80",
        "decode.kvMemory=4 GB RAM",
        "workers.transport=carrier-pigeon",
        "workers.device=abacus",
        "workers.maxModelLen=0",
        "prefill.nodesPerWorker=0",
        "gateway.extraArgs=--verbose",
        "gateway.handoffThreshold=-1",
        "runAsUser=0",
        "model.path=Qwen3-0.6B",
        "model.hub.id=Qwen3-0.6B",
        "model.cache.size=much",
        "tls.issuer=letsencrypt",
        "mtls.existingSecrets.worker=certificates",
        "certificates.duration=90d",
        "autoscaling.kind=vpa",
        "monitoring.monitor=true",
        "monitoring.rules.errorRatio=2",
        "monitoring.rules.ttftSeconds=3",
        "monitoring.rules.ttftObjective=1",
        "monitoring.rules.runbooks=docs",
        "ingress.hosts=chat.example.com",
    ]
    with pytest.raises(Refused) as refused:
        helm.render(None, "--set", ",".join(wrong))
    for setting in wrong:  # the path is on one line, however this version of helm writes it
        assert re.search(setting.partition("=")[0].replace(".", ".*"), str(refused.value)), setting


def test_the_values_fit_on_a_few_screens_and_almost_all_say_what_they_are_for():
    assert len((CHART / "values.yaml").read_text().splitlines()) <= MAX_LINES


# What a file of values has to say besides, so that a value matters. The first group that has a value shows it.
FROM_HUB: dict[str, Any] = {"model": {"hostPath": ""}, "tls": {"existingSecret": ""}}
VARIANTS: dict[str, dict[str, Any]] = {
    "an own volume": {
        "model": {"hub": {"id": ""}, "cache": {"size": ""}, "hostPath": ""},
        "keys": {"existingSecret": "", "apiKeySecret": ""},
        "tls": {"existingSecret": ""},
        "mtls": {"existingSecrets": dict.fromkeys(("gateway", "prefill", "decode", "redis"), "")},
        "redis": {"passwordSecret": ""},
    },
    "a volume of the nodes": {"model": {"hub": {"id": ""}, "cache": {"size": ""}}, "tls": {"existingSecret": ""}},
    "the hub": {"model": {"cache": {"size": ""}, "hostPath": ""}, "tls": {"issuerRef": None}},
    "a Redis of one's own": {"redis": {"enabled": False}, **FROM_HUB},
    "fixed numbers": {"autoscaling": {"kind": ""}, **FROM_HUB},
    "KEDA": {"autoscaling": {"kind": "keda"}, **FROM_HUB},
    "the hub through a volume": {**FROM_HUB},
    "a certificate checked by default": {"backendTlsPolicy": {"validation": None}, **FROM_HUB},
}
ONE_POD: dict[str, Any] = {role: {"nodesPerWorker": 1, "exclusiveTopology": ""} for role in ("prefill", "decode")}
SWITCHES = {
    "tls.enabled": True,
    "mtls.enabled": True,
    "monitoring.rules.enabled": True,
    "monitoring.dashboard.enabled": True,
    "ingress.enabled": True,
    "httpRoute.enabled": True,
    "grpcRoute.enabled": True,
    "gateway.service.type": "LoadBalancer",
    "prefill.gpus": 1,
    "decode.gpus": 1,
    "monitoring.monitor": "service",
    "autoscaling.kind": "hpa",
    "workers.device": "cuda",
}
CHOICES = {"pullPolicy", "logFormat", "gateway.handoff", "workers.transport", "workers.dtype", "model.cache.accessMode"}
CHOICES |= {"gateway.service.externalTrafficPolicy", "gateway.service.sessionAffinity"}
CHOICES |= {"monitoring.rules.ttftSeconds", "monitoring.rules.without"}
FORMS = {
    "model.path": "/{}",
    "model.mountPath": "/{}",
    "model.hostPath": "/{}",
    "model.hub.id": "text/{}",
    "kvMemory": "{}MiB",
    "size": "{}Gi",
    "duration": "{}h",
    "renewBefore": "{}m",
    "cpu": "{}m",
    "memory": "{}Mi",
    "interval": "{}s",
    "redis.maxMemory": "{}mb",
    "autoscaling.prometheus": "http://{}",
    "monitoring.rules.runbooks": "https://{}",
}
DERIVED = {"workers.startupSeconds"}  # a number of tries; test_pods.py has a test of it


def test_every_value_reaches_what_is_rendered(helm: Helm, tmp_path: Path):
    """Each is given a number of its own, which must come out, in one variant or another."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, choice in SWITCHES.items():
        put(values, path, choice)
    marks = mark(values, count(20001))
    rendered = ""
    variants = [*(ONE_POD | variant for variant in VARIANTS.values()), in_groups(values)]
    for number, variant in enumerate(variants):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(overlaid(values, variant)))
        rendered += json.dumps(helm.render(file))
    missing = [path for path, number in marks.items() if str(number) not in rendered]
    assert set(missing) == DERIVED


def in_groups(values: dict[str, Any]) -> dict[str, Any]:
    """A variant in which each worker has as many pods as the values say, one for each of its processes."""
    sizes = {role: {"tensorParallelSize": values[role]["nodesPerWorker"], "gpus": 0} for role in ("prefill", "decode")}
    return {**FROM_HUB, "workers": {"device": "cpu"}, **sizes}


def mark(values: dict[str, Any], numbers: Iterator[int], parent: str = "") -> dict[str, int]:
    """Replaces every value that is no choice by a number, in the form that it asks for; returns them by path."""
    marks: dict[str, int] = {}
    for key, value in values.items():
        path = f"{parent}{key}"
        if isinstance(value, dict) and value:
            marks |= mark(value, numbers, f"{path}.")
        elif not isinstance(value, bool) and not CHOICES & {path, key} and path not in SWITCHES:
            marks[path] = number = next(numbers)
            values[key] = marked(path, value, number)
    return marks


def marked(path: str, value: Any, number: int) -> Any:
    """The number as a value of the same kind."""
    key = path.rpartition(".")[2]
    match value:
        case str():
            return FORMS.get(path, FORMS.get(key, "text-{}")).format(number)
        case float() if key == "ttftObjective":  # 0.95 or more
            return float(f"0.95{number}1")  # a zero at its end would be lost
        case float():
            return number / 1e5
        case int() | None:
            return number
        case dict() if key == "probes":
            return {"startup": {"periodSeconds": number}}
        case dict():
            return {"name" if key == "issuerRef" else "key": f"text-{number}"}
        case list() if key == "extraObjects":
            return [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"text-{number}"}}]
        case list() if key == "extraArgs":
            return [f"--option={number}"]
        case list() if key == "extraEnv":
            return [{"name": "VARIABLE", "value": f"text-{number}"}]
        case list() if key in ("dnsNames", "hostnames", "loadBalancerSourceRanges"):
            return [f"text-{number}"]
    return [{"name": f"text-{number}"}]


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        values = values[key]
    assert last in values
    values[last] = value


def overlaid(values: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    nested = {key: overlaid(values[key], value) for key, value in variant.items() if isinstance(value, dict)}
    return values | variant | nested


# Every switch and every choice, and values of the defaults' that it needs, where it needs some.
ONE_NODE = ",".join(
    f"{component}.nodeSelector.kubernetes\\.io/hostname=node-1" for component in ("gateway", "prefill", "decode")
)
CHANGES = {
    "image.pullPolicy": "Never",
    "logFormat": "text",
    "model.cache.accessMode": f"ReadWriteOnce,model.hub.id=a/b,model.cache.size=1Gi,{ONE_NODE}",
    "keys.allowAnonymous": "true",
    "tls.enabled": "true",
    "mtls.enabled": "true",
    "allowPlaintext": "false,mtls.enabled=true",
    "networkPolicy.enabled": "false",
    "gateway.handoff": "never",
    "serviceAccount.create": "false,serviceAccount.name=mine",
    "gateway.service.type": "NodePort",
    "gateway.service.externalTrafficPolicy": "Local,gateway.service.type=NodePort",
    "gateway.service.sessionAffinity": "ClientIP",
    "gateway.podDisruptionBudget.enabled": "false",
    "prefill.podDisruptionBudget.enabled": "false",
    "decode.podDisruptionBudget.enabled": "false",
    "prefill.gpus": "1,workers.device=auto",
    "decode.gpus": "1,workers.device=auto",
    "workers.transport": "grpc",
    "workers.device": "auto",
    "workers.dtype": "float32",
    "redis.enabled": "false,redis.urlSecret=url",
    "redis.image.pullPolicy": "Never",
    "autoscaling.kind": "hpa,monitoring.rules.enabled=true",
    "monitoring.monitor": "pod",
    "monitoring.rules.enabled": "true",
    "monitoring.rules.ttftSeconds": "5,monitoring.rules.enabled=true",
    "monitoring.rules.without": "{BatonRefusals},monitoring.rules.enabled=true",
    "monitoring.dashboard.enabled": "true",
    "ingress.enabled": "true,ingress.host=chat.example.com",
    "httpRoute.enabled": "true,httpRoute.parentRefs[0].name=public",
    "grpcRoute.enabled": "true,grpcRoute.parentRefs[0].name=public",
}


def test_every_switch_and_choice_is_tried():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    kept = {path for path in leaves(values) if path in CHOICES | SWITCHES.keys() or path.rpartition(".")[2] in CHOICES}
    assert set(CHANGES) == kept | {path for path, value in leaves(values).items() if isinstance(value, bool)}


def leaves(values: dict[str, Any], parent: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{parent}{key}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


@pytest.mark.few(12)
@pytest.mark.parametrize("path", CHANGES)
def test_a_switch_or_choice_changes_what_is_rendered(helm: Helm, path: str):
    """Compared with the same values without it; `allowPlaintext` alone decides only whether anything is rendered."""
    change = f"{path}={CHANGES[path]}"
    own, _, needed = change.partition(",")
    base = ["--set", needed] if needed else []
    if path == "allowPlaintext":
        with pytest.raises(Refused):
            helm.render(None, "--set", own)
    else:
        assert without_passwords(helm.render(None, "--set", change)) != without_passwords(helm.render(None, *base))


def without_passwords(manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each["kind"] != "Secret"]


def test_the_case_of_everything_names_all_kinds_of_manifests(helm: Helm):
    """So that what is tested with it is tested with all; the other ones are those that exclude each other."""
    others = {"PersistentVolumeClaim", "Job", "ScaledObject", "PodMonitor", "LeaderWorkerSet"}
    kinds = {
        line for file in CHART.glob("templates/*.yaml") for line in re.findall(r"^kind: (\w+)$", file.read_text(), re.M)
    }
    assert kinds - others <= {each["kind"] for each in helm.render(EVERYTHING)}
