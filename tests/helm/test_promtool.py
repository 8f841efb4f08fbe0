"""Rules and boards as Prometheus itself takes them: their syntax, and when each alert begins.

promtool is in Debian's package `prometheus`.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CASES, Helm, of_kind
from tests.helm.test_boards import queries
from tests.machine import PROMTOOL, needs

pytestmark = needs(PROMTOOL)

_GATEWAY = 'namespace="default",pod="demo-baton-gateway-0"'
_DECODE, _PREFILL = f'worker="d:1",role="decode",{_GATEWAY}', f'worker="p:1",role="prefill",{_GATEWAY}'

# A release to which nothing happens that an alert is for, but what looks like it: series, with a sample each minute.
HEALTHY = {
    f"up{{{_GATEWAY}}}": "1x720",
    f"baton_requests_in_flight{{{_GATEWAY}}}": "3x720",
    f'baton_worker_info{{kernels="avx2",{_DECODE}}}': "1x720",
    f'baton_worker_info{{kernels="avx2",{_PREFILL}}}': "1x720",
    f"baton_worker_running{{{_DECODE}}}": "4x720",
    f"baton_worker_waiting{{{_DECODE}}}": "2x720",
    f"baton_worker_draining{{{_DECODE}}}": "0x720",
    f"baton_blocks_quarantined{{{_DECODE}}}": "0x720",
    f"baton_worker_not_finite{{{_DECODE}}}": "2x720",  # long ago
    f"baton_worker_gc_pause_microseconds{{{_DECODE}}}": "0+60000x720",
    f"baton_gateway_gc_pause_microseconds{{{_GATEWAY}}}": "0+60000x720",
    f'baton_requests_total{{endpoint="chat.completions",status="200",{_GATEWAY}}}': "0+60x720",
    f'baton_requests_total{{endpoint="ready",status="503",{_GATEWAY}}}': "0+60x720",  # of a probe
    f'baton_ttft_seconds_bucket{{le="10.0",{_GATEWAY}}}': "0+60x720",
    f"baton_ttft_seconds_count{{{_GATEWAY}}}": "0+60x720",
    f'baton_admission_refusals_total{{cause="key_requests",{_GATEWAY}}}': "0+6x720",  # of a key's own limits
    f'baton_handoffs_total{{outcome="completed",{_GATEWAY}}}': "0+30x720",
    f'baton_handoff_failures_total{{reason="stalled",{_GATEWAY}}}': "0+1x720",
    f'baton_plans_total{{plan="pair",why="sooner",{_GATEWAY}}}': "0+30x720",
    f'baton_plans_total{{plan="decode",why="no pair",{_GATEWAY}}}': "0+10x720",
    f'baton_plans_total{{plan="decode",why="suspect",{_GATEWAY}}}': "3x720",  # long ago
    f"baton_limits_alone{{{_GATEWAY}}}": "0x720",
    f'baton_files_refused_seconds{{files="keys",{_GATEWAY}}}': "0x720",
    f"baton_index_malformed_entries{{{_GATEWAY}}}": "5x720",
    f"baton_gateway_log_lines_dropped{{{_GATEWAY}}}": "7x720",
    f'baton_gateway_loop_pause_seconds_bucket{{le="0.5",{_GATEWAY}}}': "0+600x720",
    f'baton_gateway_loop_pause_seconds_bucket{{le="1.0",{_GATEWAY}}}': "0+600x720",
    f'baton_gateway_loop_pause_seconds_bucket{{le="+Inf",{_GATEWAY}}}': "0+600x720",
}
_MINUTES = (5, 45, 400, 700)


@dataclass(frozen=True)
class Case:
    """An alert: what differs from HEALTHY (None: the series is not there), when it is quiet, and when it is told of.

    Times are minutes; labels are those beside the severity.
    """

    series: dict[str, str | None]
    quiet: int
    told: int
    labels: dict[str, str] = field(default_factory=dict)


_POD = {"pod": "demo-baton-gateway-0"}
_OF_ROLE = {"namespace": "default"}
_WORKER = {"worker": "d:1"}
ALERTS = {
    "BatonNoGateway": Case({f"baton_requests_in_flight{{{_GATEWAY}}}": "3x10 stale"}, 15, 16, _OF_ROLE),
    "BatonGatewayDown": Case({f"up{{{_GATEWAY}}}": "1x10 0x720"}, 12, 13, _POD),
    "BatonNoDecodeWorker": Case(
        {f'baton_worker_info{{kernels="avx2",{_DECODE}}}': "1x10 stale"}, 12, 13, _OF_ROLE | {"role": "decode"}
    ),
    "BatonNoDecodeWorkerYet": Case(
        {f'baton_worker_info{{kernels="avx2",{_DECODE}}}': None}, 14, 15, _OF_ROLE | {"role": "decode"}
    ),
    "BatonNoPrefillWorker": Case(
        {f'baton_worker_info{{kernels="avx2",{_PREFILL}}}': "1x10 stale"}, 25, 26, _OF_ROLE | {"role": "prefill"}
    ),
    "BatonWorkerRefused": Case(
        {f'baton_worker_refused{{worker="x:1",why="it serves model b",{_GATEWAY}}}': "_x10 1x720"},
        24,
        26,
        {"worker": "x:1", "why": "it serves model b"},
    ),
    "BatonDrainHangs": Case({f"baton_worker_draining{{{_DECODE}}}": "0x10 1x720"}, 16, 17, _WORKER),
    "BatonErrors": Case(
        {f'baton_requests_total{{endpoint="chat.completions",status="500",{_GATEWAY}}}': "0+3x720"}, 5, 10
    ),
    # A fifth is late from 120 on: 14.4 % of an hour's is reached 43 minutes later.
    "BatonFirstTokensLate": Case(
        {f'baton_ttft_seconds_bucket{{le="10.0",{_GATEWAY}}}': "0+60x120 7248+48x600"},
        155,
        170,
        {"namespace": "default", "release": "demo"},
    ),
    # A tenth is late from 360 on: 6 % of six hours' is reached 216 minutes later.
    "BatonFirstTokensOftenLate": Case(
        {f'baton_ttft_seconds_bucket{{le="10.0",{_GATEWAY}}}': "0+60x360 21654+54x360"},
        560,
        590,
        {"namespace": "default", "release": "demo"},
    ),
    "BatonQueueLong": Case({f"baton_worker_waiting{{{_DECODE}}}": "2x10 9x720"}, 20, 21, {"role": "decode"}),
    "BatonRefusals": Case(
        {f'baton_admission_refusals_total{{cause="in_flight",{_GATEWAY}}}': "0+6x720"}, 9, 13, {"cause": "in_flight"}
    ),
    "BatonHandoffsFail": Case(
        {f'baton_handoff_failures_total{{reason="stale",{_GATEWAY}}}': "0+6x720"}, 9, 13, {"reason": "stale"}
    ),
    "BatonNoPair": Case({f'baton_plans_total{{plan="decode",why="no pair",{_GATEWAY}}}': "0+60x720"}, 14, 18),
    "BatonBlocksQuarantined": Case({f"baton_blocks_quarantined{{{_DECODE}}}": "0x10 4x720"}, 40, 41, _WORKER),
    "BatonNumbersNotFinite": Case({f"baton_worker_not_finite{{{_DECODE}}}": "2x20 3x720"}, 20, 21, _WORKER),
    "BatonSuspectRequest": Case({f'baton_plans_total{{plan="decode",why="suspect",{_GATEWAY}}}': "3x20 4x720"}, 20, 21),
    "BatonRedisAway": Case({f"baton_limits_alone{{{_GATEWAY}}}": "0x10 1x720"}, 15, 16, _POD),
    "BatonForeignEntries": Case({f"baton_index_malformed_entries{{{_GATEWAY}}}": "5x20 6x720"}, 20, 21, _POD),
    "BatonFilesRefused": Case(
        {f'baton_files_refused_seconds{{files="keys",{_GATEWAY}}}': "0x10 30+60x720"}, 11, 12, _POD | {"files": "keys"}
    ),
    "BatonGatewayStalls": Case(
        {f'baton_gateway_loop_pause_seconds_bucket{{le="0.5",{_GATEWAY}}}': "0+300x720"}, 9, 13, _POD
    ),
    "BatonGarbagePauses": Case({f"baton_worker_gc_pause_microseconds{{{_DECODE}}}": "0+3000000x720"}, 14, 26, _WORKER),
    "BatonLogLinesDropped": Case({f"baton_gateway_log_lines_dropped{{{_GATEWAY}}}": "7x20 9x720"}, 20, 21, _POD),
}


@pytest.fixture(scope="module")
def rules(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules of a release with the chart's own values."""
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    (manifest,) = of_kind(helm.render(None, "--set", "monitoring.rules.enabled=true"), "PrometheusRule").values()
    file.write_text(yaml.safe_dump(manifest["spec"]))
    return file


def alerts_in(rules: Path) -> dict[str, Any]:
    groups = yaml.safe_load(rules.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def promtool(*arguments: str | Path) -> str:
    """What it says; fails where it finds something."""
    result = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run(rules: Path, series: dict[str, str], expected: list[dict[str, Any]]) -> None:
    """Has promtool evaluate all rules once a minute, and compare alerts with what is expected."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": expected,
    }
    file = rules.with_name("test.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", file)


def expected_alert(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """As promtool wants it: with its annotations as they would be sent."""
    fill = lambda text: re.sub(r"{{ *\$labels\.(\w+) *}}", lambda found: labels.get(found[1], ""), text)
    annotations = {name: fill(text) for name, text in rule["annotations"].items()}
    return {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem if case else "defaults")
def test_prometheus_takes_the_rules(helm: Helm, case: Path | None, tmp_path: Path):
    manifests = helm.render(case, "--set", "monitoring.rules.enabled=true")
    for manifest in of_kind(manifests, "PrometheusRule").values():
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(manifest["spec"]))
        assert "30 rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


def test_prometheus_takes_the_queries_of_the_boards(tmp_path: Path):
    """As if they were recorded."""
    groups = [{"name": "boards", "rules": list(recorded())}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    assert f"{len(groups[0]['rules'])} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


def recorded() -> Iterator[dict[str, str]]:
    for number, (_, query) in enumerate(queries()):
        if "label_values" not in query:
            yield {"record": f"board:query:{number}", "expr": query.replace("$__rate_interval", "5m")}


def test_every_alert_is_tried(rules: Path):
    assert ALERTS.keys() == alerts_in(rules).keys()


@pytest.mark.long
def test_no_alert_is_told_of_while_nothing_is_wrong(rules: Path):
    """What looks like it is there: probes that fail, limits of a key, what happened long ago."""
    expected = [
        {"alertname": name, "eval_time": f"{minute}m", "exp_alerts": []} for name in ALERTS for minute in _MINUTES
    ]
    run(rules, HEALTHY, expected)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_told_of_when_it_should_be_and_not_before(rules: Path, name: str):
    case, rule = ALERTS[name], alerts_in(rules)[name]
    series = {each: values for each, values in (HEALTHY | case.series).items() if values is not None}
    told = {"alertname": name, "eval_time": f"{case.told}m", "exp_alerts": [expected_alert(rule, case.labels)]}
    run(rules, series, [{"alertname": name, "eval_time": f"{case.quiet}m", "exp_alerts": []}, told])


def test_the_first_suspect_request_of_a_gateway_is_told_of(rules: Path):
    """Its counter appears with it, and does not increase. One of a gateway that was just found may be old."""
    name, counter = "BatonSuspectRequest", f'baton_plans_total{{plan="decode",why="suspect",{_GATEWAY}}}'
    told = {"alertname": name, "eval_time": "31m", "exp_alerts": [expected_alert(alerts_in(rules)[name], {})]}
    quiet = [{"alertname": name, "eval_time": f"{minute}m", "exp_alerts": []} for minute in (29, 42)]
    run(rules, HEALTHY | {counter: "_x30 1x720"}, [*quiet, told])
    run(rules, HEALTHY, [{"alertname": name, "eval_time": "2m", "exp_alerts": []}])
