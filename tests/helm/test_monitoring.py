"""Monitors find the gateways, autoscalers ask for what rules record, and routes give streams their time."""

from pathlib import Path

import pytest

from tests.helm.chart import CPU, EVERYTHING, Helm, component_of, container_of, of_kind, pods_found


def test_the_records_of_the_rules_are_what_horizontal_autoscalers_ask_for(helm: Helm):
    manifests = helm.render(EVERYTHING)
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    recorded = {rule["record"]: rule["labels"] for rule in rules["spec"]["groups"][0]["rules"]}
    scalers = of_kind(manifests, "HorizontalPodAutoscaler").values()
    metrics = [metric["external"]["metric"] for each in scalers for metric in each["spec"]["metrics"]]
    assert {metric["name"] for metric in metrics} == set(recorded)
    for metric in metrics:
        assert metric["selector"]["matchLabels"].items() <= recorded[metric["name"]].items()


@pytest.mark.parametrize(("case", "kind"), [(EVERYTHING, "ServiceMonitor"), (CPU, "PodMonitor")])
def test_a_monitor_finds_the_gateways_and_their_port(helm: Helm, case: Path, kind: str):
    manifests = helm.render(case)
    (monitor,) = of_kind(manifests, kind).values()
    selector = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    if kind == "PodMonitor":
        (component,) = pods_found(manifests, selector)
        ports = [port["name"] for port in container_of(manifests, component)["ports"]]
    else:
        services = [each for each in of_kind(manifests, "Service").values() if component_of(each) == "gateway"]
        assert all(selector.items() <= each["metadata"]["labels"].items() for each in services)
        ports = [port["name"] for each in services for port in each["spec"]["ports"]]
    assert ports.count(endpoint["port"]) == 1


@pytest.mark.parametrize(
    ("values", "trusted"),
    [
        (
            {"tls.enabled": "true"},
            {"serverName": "demo-baton", "ca": {"secret": {"name": "demo-baton-tls", "key": "ca.crt"}}},
        ),
        ({"tls.enabled": "true", "tls.existingSecret": "mine"}, {"serverName": "demo-baton"}),
        ({"tls.enabled": "true", "monitoring.tlsConfig.insecureSkipVerify": "true"}, {"insecureSkipVerify": True}),
        ({}, None),
    ],
)
def test_a_monitor_and_the_probes_speak_tls_where_gateways_do(helm: Helm, values: dict[str, str], trusted: object):
    """Prometheus checks the certificate; a kubelet does not."""
    chosen = {"monitoring.monitor": "pod", **values}
    manifests = helm.render(None, "--set", ",".join(f"{key}={value}" for key, value in chosen.items()))
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint.get("scheme"), endpoint.get("tlsConfig")) == ("https" if trusted else None, trusted)
    gateway = container_of(manifests, "gateway")
    schemes = {gateway[probe]["httpGet"]["scheme"] for probe in gateway if probe.endswith("Probe")}
    assert schemes == {"HTTPS" if trusted else "HTTP"}


def test_ingress_and_route_give_streams_as_long_as_the_gateway_does(helm: Helm):
    manifests = helm.render(EVERYTHING)
    (ingress,) = of_kind(manifests, "Ingress").values()
    annotations = ingress["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/proxy"
    assert (annotations[f"{prefix}-read-timeout"], annotations[f"{prefix}-buffering"]) == ("3600", "off")
    (route,) = of_kind(manifests, "HTTPRoute").values()
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    service = of_kind(manifests, "Service")[path["backend"]["service"]["name"]]
    assert service["spec"]["ports"][0]["port"] == path["backend"]["service"]["port"]["number"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
