"""The chart's values that are options of a process allow what the options allow, and have their defaults."""

import json
import re
from dataclasses import MISSING
from enum import StrEnum
from typing import Any

import pytest
import yaml

from services.config.option import OptionField, options_of
from services.process.configs import WORKER_PORTS, GatewayConfig, ModelChoice, WorkerConfig
from tests.helm.chart import CHART

# By component and flag, the value of the chart that the flag gets.
VALUES = {
    "gateway": {
        "--model": "model.path",
        "--served-model-name": "model.servedName",
        "--host": "gateway.host",
        "--allow-plaintext": "allowPlaintext",
        "--port": "gateway.port",
        "--grpc-port": "gateway.grpcPort",
        "--admin-host": "gateway.host",
        "--admin-port": "gateway.adminPort",
        "--handoff": "gateway.handoff",
        "--handoff-threshold": "gateway.handoffThreshold",
        "--request-timeout": "gateway.requestTimeoutSeconds",
        "--drain-timeout": "drainTimeoutSeconds",
        "--log-format": "logFormat",
    },
    "worker": {
        "--model": "model.path",
        "--port": "prefill.port",
        "--allow-plaintext": "allowPlaintext",
        "--transport": "workers.transport",
        "--dtype": "workers.dtype",
        "--kv-memory": "prefill.kvMemory",
        "--max-model-len": "workers.maxModelLen",
        "--drain-timeout": "drainTimeoutSeconds",
        "--log-format": "logFormat",
    },
}
FROM_THE_POD = {"gateway": {"--allow-anonymous"}, "worker": {"--host", "--num-threads"}}
# Where the chart chooses otherwise than a process would: for pods, and for programs that read their logs.
OWN_DEFAULTS = {"gateway.host", "allowPlaintext", "prefill.kvMemory", "logFormat"}
OWN_LIMITS = {
    "gateway.port",
    "gateway.grpcPort",
    "gateway.adminPort",
    "prefill.port",
    "gateway.requestTimeoutSeconds",
    "drainTimeoutSeconds",
}  # no rights; whole s
OPTIONS = {
    "gateway": [*options_of(ModelChoice), *options_of(GatewayConfig)],
    "worker": [*options_of(ModelChoice), *options_of(WorkerConfig)],
}
CASES = [(part, flag, path) for part, values in VALUES.items() for flag, path in values.items()]

each_value = pytest.mark.parametrize(("part", "flag", "path"), CASES, ids=[f"{part}{flag}" for part, flag, _ in CASES])


def option(part: str, flag: str) -> OptionField:
    (found,) = (field for field in OPTIONS[part] if field.flag == flag)
    return found


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def schema_at(path: str) -> dict[str, Any]:
    """The schema of a value, its references resolved."""
    whole = json.loads((CHART / "values.schema.json").read_text())
    found: dict[str, Any] = whole
    for key in path.split("."):
        found = resolved(found["properties"][key], whole)
    return found


def resolved(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        definition: dict[str, Any] = whole["definitions"][schema["$ref"].rpartition("/")[2]]
        return definition
    if "anyOf" in schema:
        first, null = schema["anyOf"]
        found = resolved(first, whole)
        return found | {"type": [found["type"], null["type"]]}
    return schema


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_the_templates_give_these_flags_and_no_other(part: str) -> None:
    template = (CHART / "templates" / f"{part}-deployment.yaml").read_text()
    flags = set(re.findall(r"(?<=[ \"])--[a-z][a-z-]+", template))
    assert flags == VALUES[part].keys() | FROM_THE_POD[part]
    assert flags <= {field.flag for field in OPTIONS[part]}


@each_value
def test_a_value_allows_what_the_option_allows(part: str, flag: str, path: str) -> None:
    field, schema = option(part, flag), schema_at(path)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum):
        assert set(schema["enum"]) == set(field.type)
        return
    assert ("null" in schema["type"]) == (field.default is None)
    if path not in OWN_LIMITS:
        assert schema.get("minimum") == field.option.min
        assert schema.get("maximum") == field.option.max


@each_value
def test_a_value_has_the_option_s_default(part: str, flag: str, path: str) -> None:
    field, default = option(part, flag), at(yaml.safe_load((CHART / "values.yaml").read_text()), path)
    if field.default is not MISSING:
        assert (default == field.default) == (path not in OWN_DEFAULTS)


def test_workers_have_the_ports_of_their_role() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {role.value: values[role]["port"] for role in WORKER_PORTS} == WORKER_PORTS
    assert schema_at("prefill") == schema_at("decode")
