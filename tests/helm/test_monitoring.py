"""Dashboard, alerts and autoscalers ask for metrics that gateways have, and for labels that these have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.http.application import Application
from services.gateway.http.routes import described
from services.gateway.openai.app import OPEN_PATHS
from tests.gateway.running_api import running_api
from tests.helm.chart import CHART, CPU, EVERYTHING, Helm, Manifest, component_of, container_of, of_kind, pods_found
from tests.test_docs import registered_metrics

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
# What Prometheus adds to every sample: where it found it.
PLACE = {"namespace", "job", "pod"}
_METRIC = re.compile(r"\b(baton_\w+)\s*(\{[^}]*\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\bby\s*\(([\w, ]*)\)")


def samples() -> dict[str, frozenset[str]]:
    """The names of all samples, and the labels of each."""
    found: dict[str, frozenset[str]] = {}
    for name, kind, labels in registered_metrics():
        names = [name] if kind != "histogram" else [f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")]
        found |= {each: labels | PLACE | ({"le"} if each.endswith("_bucket") else set()) for each in names}
    return found


def problems(query: str) -> list[str]:
    """What in a query names no metric, or a label that the metric does not have."""
    known, none = samples(), frozenset[str]()
    found = [f"no metric {name}" for name, _ in _METRIC.findall(query) if name not in known]
    for name, selector in _METRIC.findall(query):
        found += [f"{name} has no {label}" for label in _LABEL.findall(selector) if label not in known.get(name, none)]
    named = none.union(*(known.get(name, none) for name, _ in _METRIC.findall(query)))
    grouped = {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",")}
    return found + [f"no label {label}" for label in sorted(grouped - named)]


def dashboard_queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


@pytest.mark.parametrize(
    "query",
    [
        "rate(baton_request_total[5m])",
        'baton_ttft_seconds_sum{role="decode"}',
        "sum by (worker) (baton_requests_in_flight)",
    ],
)
def test_a_query_that_would_find_nothing_is_noticed(query: str):
    assert problems(query)


@pytest.mark.parametrize("query", list(dashboard_queries()))
def test_the_dashboard_asks_for_metrics_that_are_there(query: str):
    assert problems(query) == []


def requests_counted(manifests: list[Manifest]) -> list[str]:
    """The selectors of all queries of requests, the dashboard's too."""
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    queries = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    found = [each for query in [*queries, *dashboard_queries()] for each in _METRIC.findall(query)]
    return [selector for name, selector in found if name == "baton_requests_total"]


async def test_alerts_and_dashboard_count_requests_of_clients_alone(helm: Helm):
    """Kubelet and Prometheus ask every few seconds: /ready with 503 while no worker is there."""
    async with running_api() as api:
        api_app, admin_app = api.applications
        assert isinstance(api_app, Application)
        assert isinstance(admin_app, Application)
        for each in described(admin_app.router.routes):
            await api.admin.get(each.path.replace("{request_id:path}", "none"))
        for path in (*OPEN_PATHS, "/load"):
            await api.http.get(path)
        probes = endpoints_counted((await api.admin.get("/metrics")).text)
        for each in described(api_app.router.routes):
            await api.http.request(each.method, each.path.replace("{", "").replace("}", ""))
        others = endpoints_counted((await api.admin.get("/metrics")).text) - probes
    assert {"health", "ready", "ping", "metrics", "load", "debug.requests"} <= probes
    assert {"chat.completions", "responses", "messages", "models"} <= others
    selectors = requests_counted(helm.render(EVERYTHING))
    assert len(selectors) == 3
    for selector in selectors:
        (left_out,) = re.findall(r'endpoint!~"([^"]*)"', selector.replace("\\", ""))
        assert {name for name in probes | others if re.fullmatch(left_out, name)} == probes


def endpoints_counted(metrics: str) -> set[str]:
    return set(re.findall(r'^baton_requests_total{endpoint="([^"]+)"', metrics, re.MULTILINE))


def test_the_loss_of_all_decode_workers_is_told_at_once_and_a_first_model_has_its_time(helm: Helm):
    (rules,) = of_kind(helm.render(EVERYTHING), "PrometheusRule").values()
    alerts = {rule["alert"]: rule for rule in rules["spec"]["groups"][1]["rules"]}
    lost, never = alerts["BatonNoDecodeWorker"], alerts["BatonNoDecodeWorkerYet"]
    assert lost["expr"].startswith(f"{never['expr']} and on() count(count_over_time(")
    assert (lost["for"], never["for"]) == ("2m", "1500s")  # startupSeconds is 1200 there


def test_the_dashboard_shows_almost_all_metrics_and_each_legend_names_a_label():
    shown = " ".join(dashboard_queries())
    hidden = {name for name, _, _ in registered_metrics() if name not in shown}
    assert {name for name in hidden if "gc_" not in name} == {
        "baton_ignored_fields_total",
        "baton_attempts_total",
        "baton_attempt_ends_total",
        "baton_cached_tokens_predicted_total",
        "baton_cached_tokens_actual_total",
        "baton_blocks_quarantined",  # there is an alert
        "baton_worker_not_finite",  # and here
        "baton_worker_refused",  # `baton restart` and doctor tell of it
        "baton_gateway_log_lines_dropped",
        "baton_index_malformed_entries",
        "baton_files_refused_seconds",  # there is an alert
        "baton_limits_gateways",
        "baton_limits_alone",
        "baton_worker_computed_tokens",
    }
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"]


def dashboard_of(helm: Helm, *options: str) -> tuple[str, Any]:
    """The name of its file, and what is in it."""
    manifests = helm.render(None, "--set", "monitoring.dashboard.enabled=true", *options)
    (manifest,) = of_kind(manifests, "ConfigMap").values()
    assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
    ((file, text),) = manifest["data"].items()
    return file, json.loads(text)


def test_the_dashboard_is_for_grafanas_sidecar_and_has_names_that_no_other_release_has(helm: Helm):
    """Grafana replaces a dashboard by another one of its uid, and the sidecar a file by another one of its name."""
    file, shown = dashboard_of(helm)
    other_file, other = dashboard_of(helm, "--namespace", "other")
    assert {key for key in shown if shown[key] != DASHBOARD[key]} == {"uid", "title"}
    assert shown.keys() == DASHBOARD.keys()
    assert (file, shown["title"]) == ("default-demo-baton.json", "Baton: default-demo-baton")
    assert not {file, shown["uid"], shown["title"]} & {other_file, other["uid"], other["title"]}
    assert len(shown["uid"]) <= 40  # as Grafana wants it


def test_rules_and_autoscalers_ask_for_metrics_that_are_there(helm: Helm):
    (rules,) = of_kind(helm.render(EVERYTHING), "PrometheusRule").values()
    queries = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    scaled = of_kind(helm.render(CPU), "ScaledObject").values()
    queries += [trigger["metadata"]["query"] for each in scaled for trigger in each["spec"]["triggers"]]
    assert len(queries) == 16
    assert [problem for query in queries for problem in problems(query)] == []
    for query in queries:
        assert query.count("(") == query.count(")")
        assert all('namespace="default"' in selector for _, selector in _METRIC.findall(query))


def test_alerts_say_what_is_wrong(helm: Helm):
    (rules,) = of_kind(helm.render(EVERYTHING), "PrometheusRule").values()
    for rule in rules["spec"]["groups"][1]["rules"]:
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= set(
            re.findall(r"\w+", " ".join(_GROUPED.findall(rule["expr"])))
        )


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


def test_values_of_the_alerts_are_numbers_in_them(helm: Helm):
    values = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["rules"]
    (rules,) = of_kind(helm.render(EVERYTHING), "PrometheusRule").values()
    text = json.dumps(rules)
    assert f"> {values['errorRatio']}" in text
    assert f"> {values['ttftSeconds']}" in text
