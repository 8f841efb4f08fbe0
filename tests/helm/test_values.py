"""The values: none is without effect, and a wrong one is refused by its name."""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.values_schema import SCHEMA, make_schema
from tests.helm.chart import CHART, EVERYTHING, Helm, Manifest, Refused

MAX_LINES = 350


def test_the_schema_is_the_one_that_values_and_options_make():
    """`make chart` writes it."""
    assert json.loads(SCHEMA.read_text()) == make_schema()


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
        "workers.device=abacus",
        "workers.maxModelLen=0",
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
        "ingress.hosts=chat.example.com",
    ]
    with pytest.raises(Refused) as refused:
        helm.render(None, "--set", ",".join(wrong))
    for setting in wrong:  # the path is on one line, however this version of helm writes it
        assert re.search(setting.partition("=")[0].replace(".", ".*"), str(refused.value)), setting


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ("redis.enabled=false", "redis.urlSecret must name a Secret"),
        ("model.existingClaim=", "model.existingClaim, model.hostPath or model.hub.id must be set"),
        ("model.cache.size=1Gi", "name one with model.hub.id"),
        ("allowPlaintext=false", "set mtls.enabled"),
        ("keys.allowAnonymous=true,keys.existingSecret=keys", "keys.allowAnonymous says that there are no keys"),
        ("tls.enabled=true,tls.issuerRef.name=letsencrypt", "tls.dnsNames must have the names"),
        ("prefill.gpus=1", "prefill.gpus asks for GPUs, and workers.device is cpu"),
        ("autoscaling.kind=keda", "autoscaling.prometheus must be the URL"),
        ("autoscaling.kind=hpa", "set monitoring.rules.enabled"),
        ("ingress.enabled=true", "ingress.host must be set"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs must name a Gateway"),
    ],
)
def test_what_cannot_work_is_refused_in_words(helm: Helm, settings: str, culprit: str):
    with pytest.raises(Refused, match=culprit):
        helm.render(None, "--set", settings)


def test_the_values_fit_on_a_few_screens_and_almost_all_say_what_they_are_for():
    assert len((CHART / "values.yaml").read_text().splitlines()) <= MAX_LINES


# What a file of values has to say besides, so that a value matters. The first group that has a value shows it.
VARIANTS: dict[str, dict[str, Any]] = {
    "an own volume": {
        "model": {"hub": {"id": ""}, "cache": {"size": ""}, "hostPath": ""},
        "keys": {"existingSecret": "", "apiKeySecret": ""},
        "tls": {"existingSecret": ""},
        "mtls": {"existingSecrets": dict.fromkeys(("gateway", "prefill", "decode", "redis"), "")},
        "redis": {"passwordSecret": ""},
    },
    "a volume of the nodes": {"model": {"hub": {"id": ""}, "cache": {"size": ""}}},
    "the hub": {"model": {"cache": {"size": ""}}},
    "a Redis of one's own": {"redis": {"enabled": False}},
    "fixed numbers": {"autoscaling": {"kind": ""}},
    "KEDA": {"autoscaling": {"kind": "keda"}},
    "the hub through a volume": {},
}
SWITCHES = {
    "tls.enabled": True,
    "mtls.enabled": True,
    "monitoring.rules.enabled": True,
    "monitoring.dashboard.enabled": True,
    "ingress.enabled": True,
    "httpRoute.enabled": True,
    "monitoring.monitor": "service",
    "autoscaling.kind": "hpa",
    "workers.device": "cuda",
}
CHOICES = {"pullPolicy", "logFormat", "gateway.handoff", "gateway.service.type", "workers.transport", "workers.dtype"}
CHOICES |= {"model.cache.accessMode"}
FORMS = {
    "model.path": "/{}",
    "model.mountPath": "/{}",
    "model.hostPath": "/{}",
    "model.hub.id": "text/{}",
    "kvMemory": "{}MiB",
    "size": "{}Gi",
    "duration": "{}h",
    "renewBefore": "{}h",
    "interval": "{}s",
    "redis.maxMemory": "{}mb",
    "autoscaling.prometheus": "http://{}",
}
DERIVED = {"workers.startupSeconds"}  # a number of tries; test_pods.py has a test of it


def test_every_value_reaches_what_is_rendered(helm: Helm, tmp_path: Path):
    """Each is given a number of its own, which must come out, in one variant or another."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, choice in SWITCHES.items():
        put(values, path, choice)
    marks = mark(values, count(20001))
    rendered = ""
    for number, variant in enumerate(VARIANTS.values()):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(overlaid(values, variant)))
        rendered += json.dumps(helm.render(file))
    missing = [path for path, number in marks.items() if str(number) not in rendered]
    assert set(missing) == DERIVED


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
        case float():
            return number / 1e5
        case int() | None:
            return number
        case dict():
            return {"name" if key == "issuerRef" else "key": f"text-{number}"}
        case list() if key == "extraArgs":
            return [f"--option={number}"]
        case list() if key == "extraEnv":
            return [{"name": "VARIABLE", "value": f"text-{number}"}]
        case list() if key in ("dnsNames", "hostnames"):
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
CHANGES = {
    "image.pullPolicy": "Never",
    "logFormat": "text",
    "model.cache.accessMode": "ReadWriteOnce,model.hub.id=a/b,model.cache.size=1Gi",
    "keys.allowAnonymous": "true",
    "tls.enabled": "true",
    "mtls.enabled": "true",
    "allowPlaintext": "false,mtls.enabled=true",
    "networkPolicy.enabled": "false",
    "gateway.handoff": "never",
    "gateway.service.type": "NodePort",
    "workers.transport": "grpc",
    "workers.device": "cuda",
    "workers.dtype": "float32",
    "redis.enabled": "false,redis.urlSecret=url",
    "redis.image.pullPolicy": "Never",
    "autoscaling.kind": "hpa,monitoring.rules.enabled=true",
    "monitoring.monitor": "pod",
    "monitoring.rules.enabled": "true",
    "monitoring.dashboard.enabled": "true",
    "ingress.enabled": "true,ingress.host=chat.example.com",
    "httpRoute.enabled": "true,httpRoute.parentRefs[0].name=public",
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
    others = {"PersistentVolumeClaim", "Job", "ScaledObject", "PodMonitor"}
    kinds = {
        line for file in CHART.glob("templates/*.yaml") for line in re.findall(r"^kind: (\w+)$", file.read_text(), re.M)
    }
    assert kinds - others <= {each["kind"] for each in helm.render(EVERYTHING)}
