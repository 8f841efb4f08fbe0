"""Alerts ask for metrics that gateways have, say what is wrong, and lead to a section that says what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.http.application import Application
from services.gateway.http.routes import described
from services.gateway.openai.app import OPEN_PATHS
from tests.gateway.running_api import running_api
from tests.helm.chart import CHART, CPU, EVERYTHING, Helm, Refused, of_kind
from tests.helm.promql import GROUPED, METRIC, problems
from tests.helm.test_boards import COUNTING, queries
from tests.test_docs import ROOT, anchors

RUNBOOKS = ROOT / "docs" / "run" / "alerts.md"
ENABLED = "monitoring.rules.enabled=true"


def rules_of(helm: Helm, case: Path | None = EVERYTHING, *options: str) -> list[dict[str, Any]]:
    """All rules of a release: those that record, then alerts."""
    (manifest,) = of_kind(helm.render(case, *options), "PrometheusRule").values()
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def alerts_of(helm: Helm, case: Path | None = EVERYTHING, *options: str) -> dict[str, dict[str, Any]]:
    """The alerts of a release, by name."""
    return {rule["alert"]: rule for rule in rules_of(helm, case, *options) if "alert" in rule}


def endpoints_counted(metrics: str) -> set[str]:
    return set(re.findall(r'^baton_requests_total{endpoint="([^"]+)"', metrics, re.MULTILINE))


async def test_alerts_and_boards_count_requests_of_clients_alone(helm: Helm):
    """Kubelet and Prometheus ask every few seconds: /ready with 503 while no worker is there."""
    async with running_api() as api:
        api_app, admin_app = api.applications
        assert isinstance(api_app, Application)
        assert isinstance(admin_app, Application)
        for path in (each.path for each in described(admin_app.router.routes)):
            if not path.startswith("/console/api/"):  # what a person sends from there is a client's
                async with api.admin.stream("GET", path.replace("{request_id:path}", "none")):
                    pass  # a feed has no end: its client leaves
        for path in (*OPEN_PATHS, "/load"):
            await api.http.get(path)
        probes = set[str]()
        while "console.feed" not in probes:  # counted when the gateway notices
            probes = endpoints_counted((await api.admin.get("/metrics")).text)
        for each in described(api_app.router.routes):
            await api.http.request(each.method, each.path.replace("{", "").replace("}", ""))
        others = endpoints_counted((await api.admin.get("/metrics")).text) - probes
    assert {"health", "ready", "ping", "metrics", "load", "debug.requests"} <= probes
    assert {"chat.completions", "responses", "messages", "models"} <= others
    asked = [rule["expr"] for rule in rules_of(helm)] + [query for _, query in queries()]
    selectors = [each for query in asked for name, each in METRIC.findall(query) if name == "baton_requests_total"]
    assert len(selectors) == 3
    for selector in selectors:
        (left_out,) = re.findall(r'endpoint!~"([^"]*)"', selector)
        assert {name for name in probes | others if re.fullmatch(left_out, name)} == probes


def test_the_loss_of_all_decode_workers_is_told_at_once_and_a_first_model_has_its_time(helm: Helm):
    alerts = alerts_of(helm)
    lost, never = alerts["BatonNoDecodeWorker"], alerts["BatonNoDecodeWorkerYet"]
    assert lost["expr"].startswith(f"{never['expr']} and on() count(count_over_time(")
    assert (lost["for"], never["for"]) == ("2m", "1500s")  # startupSeconds is 1200 there


def test_rules_and_autoscalers_ask_for_metrics_that_are_there(helm: Helm):
    asked = [rule["expr"] for rule in rules_of(helm)]
    scaled = of_kind(helm.render(CPU), "ScaledObject").values()
    asked += [trigger["metadata"]["query"] for each in scaled for trigger in each["spec"]["triggers"]]
    assert len(asked) == 33
    counters_looked_at = {"baton_plans_total only ever rises: ask for its rate"}  # whether one is there at all
    assert {each for query in asked for each in problems(query, COUNTING)} - counters_looked_at == set()
    for query in asked:
        assert query.count("(") == query.count(")")
        assert all('namespace="default"' in selector for _, selector in METRIC.findall(query))


def test_alerts_ask_for_what_rules_record(helm: Helm):
    rules = rules_of(helm)
    recorded = {rule["record"]: rule["labels"] for rule in rules if "record" in rule}
    asked = [each for rule in rules for each in re.findall(r"(baton:[\w:]+)\{([^}]*)\}", rule["expr"])]
    assert len(asked) == 4
    for name, selector in asked:
        assert dict(re.findall(r'(\w+)="([^"]*)"', selector)) == recorded[name]


def test_alerts_say_what_is_wrong(helm: Helm):
    for rule in alerts_of(helm).values():
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= set(
            re.findall(r"\w+", " ".join(GROUPED.findall(rule["expr"])))
        )


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(helm: Helm):
    alerts = alerts_of(helm)
    sections = re.findall(r"^## (Baton\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sections == list(alerts)
    for name, rule in alerts.items():
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert ROOT / path == RUNBOOKS
        assert anchor in anchors(RUNBOOKS.read_text())
        assert anchor == name.lower()


def test_the_table_of_the_runbooks_has_those_that_are_critical(helm: Helm):
    (row,) = re.findall(r"^\| critical: .*$", RUNBOOKS.read_text(), re.MULTILINE)
    named = set(re.findall(r"\(#(\w+)\)", row))
    assert named == {name.lower() for name, rule in alerts_of(helm).items() if rule["labels"]["severity"] == "critical"}


def test_runbooks_that_are_served_are_the_url_of_each_alert(helm: Helm):
    base = "https://docs.example.com/run/alerts/"
    for name, rule in alerts_of(helm, EVERYTHING, "--set", f"monitoring.rules.runbooks={base}").items():
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"{base}#{name.lower()}"


def test_an_alert_that_is_not_wanted_is_left_out_and_one_that_is_none_is_refused(helm: Helm):
    every = alerts_of(helm, None, "--set", ENABLED)
    without = alerts_of(helm, None, "--set", f"{ENABLED},monitoring.rules.without={{BatonNoPair,BatonRefusals}}")
    assert every.keys() - without.keys() == {"BatonNoPair", "BatonRefusals"}
    with pytest.raises(Refused, match="there is no alert BatonPairs here"):
        helm.render(None, "--set", f"{ENABLED},monitoring.rules.without={{BatonPairs}}")


def test_no_prefill_worker_is_no_alert_where_none_is_meant_to_be(helm: Helm):
    assert "BatonNoPrefillWorker" not in alerts_of(helm, None, "--set", f"{ENABLED},prefill.replicas=0")
    scaled = f"{ENABLED},prefill.replicas=0,autoscaling.kind=hpa"
    assert "BatonNoPrefillWorker" in alerts_of(helm, None, "--set", scaled)


def test_values_of_the_alerts_are_numbers_in_them(helm: Helm):
    values = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["rules"]
    text = json.dumps(rules_of(helm))
    assert f"> {values['errorRatio']}" in text
    assert f"more than {values['ttftSeconds']} s" in text
    assert f"14.4 * (1 - {values['ttftObjective']})" in text


def test_first_tokens_can_be_late_enough_for_every_alert_at_the_lowest_objective(helm: Helm, tmp_path: Path):
    """A share is above no threshold of 1 or more."""
    lowest = json.loads((CHART / "values.schema.json").read_text())
    for name in ("monitoring", "rules", "ttftObjective"):
        lowest = lowest["properties"][name]
    values = tmp_path / "values.yaml"
    values.write_text(f"monitoring: {{rules: {{enabled: true, ttftObjective: {lowest['minimum']}}}}}")
    found = re.findall(r"> ([\d.]+) \* \(1 - ([\d.]+)\)", json.dumps(rules_of(helm, values)))
    assert len(found) == 4
    assert all(float(times) * (1 - float(objective)) < 0.8 for times, objective in found)
    lower = tmp_path / "lower.yaml"
    lower.write_text("monitoring: {rules: {ttftObjective: 0.9499}}")
    with pytest.raises(Refused, match="ttftObjective"):
        helm.render(lower)


async def test_the_time_of_a_first_token_is_a_bucket_that_gateways_count(helm: Helm, tmp_path: Path):
    """As Prometheus 2 writes it, `0.5` and `10.0`, and as `le` would be written elsewhere, `10`."""
    async with running_api() as api:
        metrics = (await api.admin.get("/metrics")).text
    bounds = set(re.findall(r'^baton_ttft_seconds_bucket{le="([^"]*)"', metrics, re.MULTILINE))
    for seconds, written in (("10", "10.0"), ("0.5", "0.5"), ("2", "2.0")):
        values = tmp_path / f"{seconds}.yaml"
        values.write_text(f"monitoring: {{rules: {{enabled: true, ttftSeconds: {seconds}}}}}")
        (pattern,) = {each for rule in rules_of(helm, values) for each in re.findall(r'le=~"([^"]*)"', rule["expr"])}
        assert {bound for bound in bounds if re.fullmatch(pattern, bound)} == {written}
    with pytest.raises(Refused, match="ttftSeconds"):
        helm.render(None, "--set", f"{ENABLED},monitoring.rules.ttftSeconds=3")
