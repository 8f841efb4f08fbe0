"""Findings on a cluster: the client of Kubernetes at a mock API server, and the chart's kinds."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.processes import free_ports
from services.doctor.cluster import OPTIONAL, RESOURCES, VERBS, check_cluster, check_nodes, check_version
from services.doctor.finding import Level
from tests.doctor.findings import levels, named
from tests.helm.chart import CPU, EVERYTHING, GROUPS, ROOT, Helm
from tests.helm.conftest import helm
from tests.helm.test_chart import CUSTOM_RESOURCES
from tests.helm.test_cluster import python

__all__ = ["helm", "python"]  # fixtures

FINE: dict[str, Any] = {
    "version": "v1.31.2",
    "groups": [*OPTIONAL],
    "refused": [],
    "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
    "nodes": [{"cpu": "8", "nvidia.com/gpu": "4", "rdma/ib": "1"}, {"cpu": "8", "nvidia.com/gpu": "4"}],
}


@contextlib.contextmanager
def cluster(python: Path, directory: Path, **rules: Any) -> Iterator[str]:
    """A mock cluster by these rules, as `cluster_with_rules` takes them; its kubeconfig."""
    command = [str(python), "-m", "tests.helm.programs.cluster_with_rules", str(directory), json.dumps(FINE | rules)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=60)


def test_a_cluster_that_has_all_and_one_that_lacks_much(python: Path, tmp_path: Path) -> None:
    with cluster(python, tmp_path) as kubeconfig:
        found = check_cluster("chat", kubeconfig)
        assert levels(found) == {
            "version": Level.OK,
            "access": Level.OK,
            "custom resources": Level.OK,
            "namespace": Level.NOTE,
            "nodes": Level.OK,
        }
        assert "PodSecurity restricted" in named(found, "namespace").found
        assert named(found, "nodes").found == "2 nodes, 8 of nvidia.com/gpu, for RDMA: rdma/ib"
        elsewhere = check_cluster("elsewhere", kubeconfig)
        assert named(elsewhere, "namespace").advice == "helm install --create-namespace"
        assert named(elsewhere, "access").level is Level.ERROR
    lacks = {"version": "v1.28.0", "groups": ["keda.sh"], "refused": ["list//secrets", "patch/apps/deployments"]}
    refused = [*lacks["refused"], "create/cert-manager.io/issuers"]  # which the cluster has not, so nobody asks
    with cluster(python, tmp_path, **lacks | {"refused": refused, "labels": {}, "nodes": [{"cpu": "4"}]}) as kubeconfig:
        found = check_cluster("chat", kubeconfig)
    assert levels(found) == {
        "version": Level.WARNING,
        "access": Level.ERROR,
        "custom resources": Level.NOTE,
        "namespace": Level.OK,
        "nodes": Level.NOTE,
    }
    assert named(found, "access").found == "not allowed in chat: secrets: list; deployments.apps: patch"
    assert "cert-manager.io" in named(found, "custom resources").found
    assert "keda.sh" not in named(found, "custom resources").found


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    parts: dict[str, Any] = {
        "clusters": [{"name": "none", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "none", "user": {}}],
        "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
        "current-context": "none",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(parts))
    (found,) = check_cluster("chat", str(file))
    assert (found.name, found.level) == ("reached", Level.ERROR)
    assert str(port) in found.found
    for rubbish in (None, "a: [", "[]", "clusters: 5", "text", "\x00"):
        file = tmp_path / "rubbish"
        if rubbish is not None:
            file.write_text(rubbish)
        (found,) = check_cluster("chat", str(file))
        assert (found.name, found.level) == ("reached", Level.ERROR)


def test_access_is_asked_to_all_that_the_chart_has(helm: Helm) -> None:
    """Three cases have all kinds between them."""
    plurals = {name.partition(" ")[2]: schema["plural"] for name, schema in CUSTOM_RESOURCES.items()}
    asked = {f"{group}/{resource}" for group, resources in RESOURCES.items() for resource in resources}
    rendered = set()
    for each in [*helm.render(CPU), *helm.render(GROUPS), *helm.render(EVERYTHING)]:
        group = each["apiVersion"].rpartition("/")[0]
        kind = each["kind"]
        regular = kind.lower().removesuffix("y") + "ies" if kind.endswith("cy") else kind.lower() + "s"
        rendered.add(f"{group}/{plurals.get(kind, 'ingresses' if kind == 'Ingress' else regular)}")
    assert rendered == asked
    assert "get" in VERBS  # helm reads what it installed


def test_versions_and_nodes() -> None:
    newer = [check_version(version).level for version in ("v1.30.0", "v1.37.1+k3s1", "v2.0.0")]
    assert newer == [Level.OK] * 3
    assert check_version("v1.29.9-gke.1").level is Level.WARNING
    assert check_nodes([]).level is Level.NOTE
