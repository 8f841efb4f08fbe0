"""What the chart renders is what Kubernetes, and those who define custom resources, take."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import CASES, Helm, Manifest, workload

OLDEST, NEWEST = 30, int(kubernetes_validate.latest_version().split(".")[1])
CUSTOM_RESOURCES = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem if case else "defaults")


@each_case
def test_lint_has_nothing_to_say(helm: Helm, case: Path | None):
    helm.lint(case)


@pytest.mark.few(3)
@pytest.mark.parametrize("minor", range(OLDEST, NEWEST + 1))
def test_kubernetes_takes_everything_that_is_rendered(helm: Helm, minor: int):
    """By kind, as lists: the schemas are read anew for every document that is validated."""
    by_kind: dict[tuple[str, str], list[Manifest]] = {}
    for manifest in rendered_of_all_cases(helm):
        if resource_of(manifest) not in CUSTOM_RESOURCES:
            by_kind.setdefault((manifest["apiVersion"], manifest["kind"]), []).append(manifest)
    for (api_version, kind), items in by_kind.items():
        every = {"apiVersion": api_version, "kind": f"{kind}List", "metadata": {}, "items": items}
        kubernetes_validate.validate(every, f"1.{minor}", strict=True)


def test_a_mistake_in_what_is_rendered_would_be_found(helm: Helm):
    mistaken = workload(helm.render(), "gateway")
    mistaken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    every = {"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {}, "items": [mistaken]}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(every, f"1.{NEWEST}", strict=True)


@pytest.mark.parametrize("resource", CUSTOM_RESOURCES)
def test_a_custom_resource_has_the_fields_that_its_definition_has(helm: Helm, resource: str):
    found = [manifest for manifest in rendered_of_all_cases(helm) if resource_of(manifest) == resource]
    assert found
    for manifest in found:
        assert problems_of(manifest) == []
    found[0]["spec"]["unheardOf"] = True
    assert problems_of(found[0]) == ["Additional properties are not allowed ('unheardOf' was unexpected)"]


def rendered_of_all_cases(helm: Helm) -> list[Manifest]:
    return [manifest for case in CASES for manifest in helm.render(case)]


def resource_of(manifest: Manifest) -> str:
    return f"{manifest['apiVersion']} {manifest['kind']}"


def problems_of(manifest: Manifest) -> list[str]:
    return [error.message for error in validator_of(resource_of(manifest)).iter_errors(manifest["spec"])]


@cache
def validator_of(resource: str) -> Any:
    return jsonschema.Draft202012Validator(CUSTOM_RESOURCES[resource]["spec"])


@each_case
def test_names_are_short_enough_and_no_two_manifests_have_the_same(helm: Helm, case: Path | None):
    """Of a release with a name as long as Helm allows; names of Services have at most 63 characters."""
    manifests = helm.render(case, "--set", f"fullnameOverride={'x' * 46}")
    named = [(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(named)) == len(named)
    assert all(len(name) <= 63 for _, _, name in named)
