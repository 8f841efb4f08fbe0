"""The chart's values that are options of a process allow what the options allow, and have their defaults."""

import json
import re
from dataclasses import MISSING
from typing import Any

import pytest
import yaml

from helm.values_schema import FLAGS, OF_THE_POD, OPTIONS, SCHEMA, TAKEN, option_schema
from services.config.option import OptionField
from services.process.configs import WORKER_PORTS
from tests.helm.chart import CASES, CHART, Helm, arguments_of

# Where the chart chooses otherwise than a process would: for pods, and for programs that read their logs.
OWN_DEFAULTS = {"gateway.host", "prefill.kvMemory", "logFormat"}
# Values of which the option is one consequence among others; an empty one leaves the option out.
DECIDING = {"keys.existingSecret", "keys.allowAnonymous", "tls.existingSecret", "tls.enabled", "mtls.enabled"}
DECIDING |= {
    "allowPlaintext",
    "workers.healthPort",
    "model.hub.revision",
    "prefill.nodesPerWorker",
    "workers.groupPort",
}
TEMPLATES = {"gateway": "gateway-deployment.yaml", "worker": "workers.yaml"}
VALUES = [(part, flag, path) for part, flags in FLAGS.items() for flag, path in flags.items() if path not in DECIDING]

each_part = pytest.mark.parametrize("part", ["gateway", "worker"])
each_value = pytest.mark.parametrize(
    ("part", "flag", "path"), VALUES, ids=[f"{part}{flag}" for part, flag, _ in VALUES]
)


def option(part: str, flag: str) -> OptionField:
    (found,) = (field for field in OPTIONS[part] if field.flag == flag)
    return found


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def schema_at(path: str) -> dict[str, Any]:
    """The schema of a value."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    for key in path.split("."):
        found = found["properties"][key]
    return {key: value for key, value in found.items() if key != "description"}


@each_part
def test_the_templates_give_these_flags_and_no_other(part: str):
    """The flags of the model are in a template of their own."""
    text = "".join((CHART / "templates" / name).read_text() for name in (TEMPLATES[part], "_model.tpl"))
    flags = set(re.findall(r'(?:- |printf ")(--[a-z][a-z-]+)', text))
    assert flags == FLAGS[part].keys() | OF_THE_POD[part].keys()


@each_part
def test_what_is_rendered_has_these_flags_and_they_are_options(helm: Helm, part: str):
    """Further options of the cases too."""
    components = ["gateway"] if part == "gateway" else ["prefill", "decode"]
    for case in CASES:
        manifests = helm.render(case)
        for component in components:
            _, *arguments = arguments_of(manifests, component)
            flags = [argument.partition("=")[0] for argument in arguments]
            assert set(flags) <= {field.flag for field in OPTIONS[part]}
            assert len(set(flags)) == len(flags)


@each_value
def test_a_value_allows_nothing_that_the_option_refuses(part: str, flag: str, path: str):
    allowed, schema = option_schema(option(part, flag)), schema_at(path)
    if path in TAKEN[part] and path != "gateway.requestTimeoutSeconds":
        assert schema == allowed
    assert schema.get("minimum", 0) >= allowed.get("minimum", 0)
    assert schema.get("maximum", 0) <= allowed.get("maximum", float("inf"))
    if "enum" not in schema:
        assert ("null" in schema["type"]) == (option(part, flag).default is None)


@each_value
def test_a_value_has_the_option_s_default(part: str, flag: str, path: str):
    field, default = option(part, flag), at(yaml.safe_load((CHART / "values.yaml").read_text()), path)
    if field.default is not MISSING and flag != "--admin-host":
        assert (default == field.default) == (path not in OWN_DEFAULTS)


def test_workers_have_the_ports_of_their_role():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {role.value: values[role]["port"] for role in WORKER_PORTS} == WORKER_PORTS
    assert values["prefill"].keys() == values["decode"].keys()
