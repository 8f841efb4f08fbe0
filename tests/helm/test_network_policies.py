"""The network policies admit the flows that Baton has, and no others."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import (
    CPU,
    EVERYTHING,
    EXTERNAL_REDIS,
    GPU,
    KEYS,
    MTLS,
    Helm,
    Manifest,
    component_of,
    containers,
    of_kind,
    pod_labels,
    pod_of,
    pods_found,
    workloads,
)
from tests.helm.test_chart import each_case

Flow = tuple[str, str, str]  # from, to, port

SERVING = {
    ("test", "gateway", "http"),
    ("gateway", "prefill", "grpc"),
    ("gateway", "decode", "grpc"),
    ("decode", "prefill", "grpc"),
}
REDIS = {(component, "redis", "redis") for component in ("gateway", "prefill", "decode")}


class Policies:
    """What a network that enforces them lets through between pods of the release."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self._policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy").values()]
        self._labels = {component_of(each): pod_labels(each) for each in workloads(manifests)}
        self._ports = {component_of(each): ports_of(each) for each in workloads(manifests)}

    def flows(self) -> set[Flow]:
        """Those that the sender's and the receiver's policies both admit."""
        pairs = product(self._labels, self._labels)
        return {(a, b, port) for a, b in pairs for port in self._ports[b] if self._admitted(a, b, port)}

    def outside(self, component: str, direction: str) -> list[tuple[Any, list[Any]]]:
        """Peers (None: everyone) and ports of the rules of a component's pods that are not about the release's pods."""
        found = []
        for rule in self._rules(component, direction):
            peers = rule.get("from", rule.get("to"))
            others = [peer for peer in peers or [] if "podSelector" not in peer]
            if peers is None or others:
                found.append((None if peers is None else others, [port["port"] for port in rule.get("ports", [])]))
        return found

    def _admitted(self, sender: str, receiver: str, port: str) -> bool:
        out = any(self._covers(rule, "to", receiver, port) for rule in self._rules(sender, "egress"))
        return out and any(self._covers(rule, "from", sender, port) for rule in self._rules(receiver, "ingress"))

    def _rules(self, component: str, direction: str) -> list[Any]:
        labels = self._labels[component].items()
        selecting = [each for each in self._policies if each["podSelector"]["matchLabels"].items() <= labels]
        assert selecting, f"no policy selects {component}"
        assert all(each["policyTypes"] == ["Ingress", "Egress"] for each in selecting)
        return [rule for each in selecting for rule in each.get(direction, [])]

    def _covers(self, rule: Any, side: str, component: str, port: str) -> bool:
        if port not in [each["port"] for each in rule.get("ports", [{"port": port}])]:
            return False
        labels = self._labels[component].items()
        selected = [peer["podSelector"]["matchLabels"] for peer in rule.get(side, []) if "podSelector" in peer]
        return side not in rule or any(selector.items() <= labels for selector in selected)


def ports_of(workload: Manifest) -> list[str]:
    """The names of the ports that its pods open, and one for those that a kernel chooses."""
    opened = [port["name"] for container in pod_of(workload)["containers"] for port in container.get("ports", [])]
    return [*opened, "chosen by the kernel"]


@pytest.mark.parametrize("case", [MTLS, KEYS, GPU])
def test_only_the_flows_of_a_handoff_and_of_redis_are_admitted(helm: Helm, case: Path):
    """With NIXL too: what it does over RDMA no policy sees, and its port is at loopback."""
    assert Policies(helm.render(case)).flows() == SERVING | REDIS


def test_kubelets_port_is_reached_by_none_of_the_release(helm: Helm):
    assert "health" not in {port for _, _, port in Policies(helm.render(MTLS)).flows()}


def test_from_outside_come_clients_and_prometheus_alone(helm: Helm):
    policies = Policies(helm.render())
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert policies.outside("gateway", "ingress") == [(None, ["http", "grpc"]), (monitoring, ["admin"])]
    for component in ("prefill", "decode", "redis", "test"):
        assert policies.outside(component, "ingress") == []


def test_clients_may_be_those_that_are_named(helm: Helm):
    ingress = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
    assert Policies(helm.render(KEYS)).outside("gateway", "ingress")[0] == (ingress, ["http", "grpc"])


DNS = (None, [53, 53])


def test_out_goes_dns_and_what_a_value_names(helm: Helm):
    policies = Policies(helm.render())
    for component in ("gateway", "prefill", "decode", "test"):
        assert policies.outside(component, "egress") == [DNS]
    assert policies.outside("redis", "egress") == []
    observers = [{"namespaceSelector": {"matchLabels": {"team": "observers"}}}]
    everything = Policies(helm.render(EVERYTHING))
    assert everything.outside("gateway", "egress") == [DNS, (observers, [4318])]
    storage = [{"namespaceSelector": {"matchLabels": {"team": "storage"}}}]
    for role in ("prefill", "decode"):
        assert everything.outside(role, "egress") == [DNS, (storage, [2049])]


def test_a_redis_of_ones_own_is_reached_where_it_is(helm: Helm):
    policies = Policies(helm.render(EXTERNAL_REDIS))
    for component in ("gateway", "prefill", "decode"):
        assert policies.outside(component, "egress") == [DNS, ([{"ipBlock": {"cidr": "10.20.0.0/16"}}], [6380])]


def test_the_hub_is_reached_by_what_fetches_the_model(helm: Helm):
    fetching, cached = Policies(helm.render(GPU)), Policies(helm.render(CPU))
    for component in ("gateway", "prefill", "decode"):
        assert fetching.outside(component, "egress") == [DNS, (None, [443])]
        assert cached.outside(component, "egress") == [DNS]
    assert cached.outside("model", "egress") == [DNS, (None, [443])]


@each_case
def test_policies_find_pods_of_the_release_and_name_ports_that_are_there(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    policies = of_kind(manifests, "NetworkPolicy")
    for policy in policies.values():
        for rule in policy["spec"].get("ingress", []):
            for peer in rule.get("from", []):
                assert "podSelector" not in peer or pods_found(manifests, peer["podSelector"]["matchLabels"])
        (*found,) = pods_found(manifests, policy["spec"]["podSelector"]["matchLabels"])
        assert found
    assert len(policies) == len({component_of(each) for each in workloads(manifests)}) + 1


def test_without_network_policies_there_are_none(helm: Helm):
    manifests = helm.render(None, "--set", "networkPolicy.enabled=false")
    assert not of_kind(manifests, "NetworkPolicy")
    assert list(containers(manifests))
