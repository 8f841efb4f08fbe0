"""Routes of the Gateway API lead to the gateways' Service, and say how it speaks TLS."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import (
    CHART,
    EVERYTHING,
    Helm,
    Manifest,
    container_of,
    environment_of,
    of_kind,
    pod_of,
    pods_found,
    workload,
)

README = (CHART / "README.md").read_text()
ENABLED = ",".join(
    f"{kind}Route.enabled=true,{kind}Route.parentRefs[0].name=public,{kind}Route.hostnames={{{kind}.example.com}}"
    for kind in ("http", "grpc")
)
OWN_CA = {"group": "", "kind": "Secret", "name": "demo-baton-tls"}


def policies(helm: Helm, settings: str) -> list[Manifest]:
    return [each["spec"] for each in of_kind(helm.render(None, "--set", settings), "BackendTLSPolicy").values()]


def test_grpc_has_a_route_to_its_port(helm: Helm):
    manifests = helm.render(EVERYTHING)
    (route,) = of_kind(manifests, "GRPCRoute").values()
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    ports = {port["name"]: port["port"] for port in of_kind(manifests, "Service")[backend["name"]]["spec"]["ports"]}
    assert backend["port"] == ports["grpc"]
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert route["spec"]["hostnames"] == ["grpc.example.com"]


@pytest.mark.parametrize(
    ("settings", "validation"),
    [
        ("", {"hostname": "demo-baton", "caCertificateRefs": [OWN_CA]}),
        (
            "tls.dnsNames={chat.example.com},tls.issuerRef.name=letsencrypt",
            {"hostname": "chat.example.com", "wellKnownCACertificates": "System"},
        ),
        (
            "tls.dnsNames={*.example.com},tls.existingSecret=mine",
            {"hostname": "baton.example.com", "wellKnownCACertificates": "System"},
        ),
        ("backendTlsPolicy.validation.hostname=a.b", {"hostname": "a.b"}),
    ],
)
def test_a_route_to_tls_has_a_policy_that_checks_the_certificate(helm: Helm, settings: str, validation: Any):
    """A name for which the certificate is good; its CA, where it is not a public one."""
    (policy,) = policies(helm, f"{ENABLED},tls.enabled=true,{settings}")
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": "demo-baton"}]
    assert policy["validation"] == validation


def test_without_tls_or_without_a_route_there_is_no_policy(helm: Helm):
    assert policies(helm, ENABLED) == []
    assert policies(helm, "tls.enabled=true") == []
    for kind in ("http", "grpc"):
        assert len(policies(helm, f"tls.enabled=true,{kind}Route.enabled=true,{kind}Route.parentRefs[0].name=a")) == 1


def example(containing: str, directory: Path) -> str:
    """The file of values that the chart's README shows with this in it."""
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if containing in block)
    file = directory / "values.yaml"
    file.write_text(text)
    return str(file)


def test_the_pool_that_the_readme_shows_has_the_gateways_and_their_port(helm: Helm, tmp_path: Path):
    """What its definition demands of the spec is there (v1 of 2026-08-18)."""
    manifests = helm.render(None, "--values", example("InferencePool", tmp_path))
    (pool,) = (each for each in manifests if each["apiVersion"] == "inference.networking.k8s.io/v1")
    assert pool["metadata"]["name"] == "demo-baton"
    assert pool["spec"].keys() == {"selector", "targetPorts"}
    assert pods_found(manifests, pool["spec"]["selector"]["matchLabels"]) == ["gateway"]
    (http,) = (each for each in container_of(manifests, "gateway")["ports"] if each["name"] == "http")
    assert pool["spec"]["targetPorts"] == [{"number": http["containerPort"]}]


def test_the_overlay_that_the_readme_shows_does_what_its_table_says(helm: Helm, tmp_path: Path):
    manifests = helm.render(None, "--values", example("containerSpec:", tmp_path))
    pod = pod_of(workload(manifests, "decode"))
    decode, proxy = pod["containers"]
    assert (pod["hostNetwork"], pod["priorityClassName"]) == (True, "serving")
    assert "fsGroupChangePolicy" not in pod["securityContext"]
    assert proxy == {"name": "proxy", "image": "proxy:1", "resources": {"limits": {"memory": "64Mi"}}}
    assert {"name": "BATON_REDIS_URL", "value": "redis://elsewhere:6379"} in environment_of(decode)
    assert (decode["livenessProbe"]["failureThreshold"], decode["livenessProbe"]["periodSeconds"]) == (30, 10)
