"""Boards for Grafana: what the script writes, of metrics that gateways have, each used as its kind asks."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helm.boards.__main__ import FOLDER, make_files
from helm.boards.metric_table import Metric, read_metrics
from helm.boards.queries import Queries
from tests.helm.chart import Helm, of_kind
from tests.helm.promql import METRIC, problems
from tests.test_docs import Described, registered_metrics

FILES = make_files()
BOARDS: dict[str, Any] = {name: json.loads(text) for name, text in FILES.items()}
# Gauges that count since a process's start. The table says so of each, in its own words.
COUNTING = frozenset(
    name
    for name, metric in read_metrics().items()
    if metric.kind == "gauge" and re.search(r"since .*start|how long these stopped it", metric.meaning)
)


def panels() -> Iterator[tuple[str, Any]]:
    """Those with queries, and their boards."""
    for name, board in BOARDS.items():
        yield from ((name, panel) for panel in board["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """The queries of panels and of variables, with the names of their boards."""
    found = [(name, target["expr"]) for name, panel in panels() for target in panel["targets"]]
    for name, board in BOARDS.items():
        found += [(name, each["query"]) for each in board["templating"]["list"] if each["type"] == "query"]
    return found


def test_the_files_are_what_the_script_writes():
    """`make chart` writes them."""
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == FILES


def test_the_script_reads_the_metrics_that_a_gateway_registers():
    read = {Described(metric.name, metric.kind, metric.labels) for metric in read_metrics().values()}
    assert read == registered_metrics()


@pytest.mark.parametrize(
    "query",
    [
        "rate(baton_request_total[5m])",
        'baton_ttft_seconds_sum{role="decode"}',
        "sum by (worker) (baton_requests_in_flight)",
        "sum(rate(baton_requests_in_flight[5m]))",
        "sum by (status) (baton_requests_total)",
        "histogram_quantile(0.9, rate(baton_ttft_seconds_bucket[5m]))",
    ],
)
def test_a_query_that_would_find_nothing_or_something_else_is_noticed(query: str):
    assert problems(query)


def test_a_query_is_not_made_of_a_metric_that_is_of_another_kind_or_has_no_such_label():
    made = Queries(read_metrics())
    for query in (
        lambda: made.rate("baton_requests_in_flight"),
        lambda: made.rate("baton_requests_total", "worker"),
        lambda: made.quantile(0.5, "baton_requests_total"),
        lambda: made.of_workers("baton_requests_in_flight"),
        lambda: made.rate("baton_unheard_of_total"),
    ):
        with pytest.raises(ValueError, match="baton_"):
            query()


def test_the_boards_ask_for_metrics_that_are_there_and_use_them_as_what_they_are():
    assert len(queries()) > 80
    assert {
        query: found for _, query in queries() if "label_values" not in query and (found := problems(query, COUNTING))
    } == {}
    variables = [query for _, query in queries() if "label_values" in query]
    assert [problem for query in variables for problem in problems(query) if "rises" not in problem] == []


def test_the_boards_show_every_metric():
    shown = {name for _, query in queries() for name, _ in METRIC.findall(query)}
    shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name, _, _ in registered_metrics()} - shown == set()


@pytest.mark.parametrize("board", BOARDS)
def test_a_legend_names_labels_that_its_query_has(board: str):
    for name, panel in panels():
        for target in panel["targets"] if name == board else ():
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]), target


@pytest.mark.parametrize("board", BOARDS)
def test_panels_do_not_overlap_and_are_on_the_board(board: str):
    cells: set[tuple[int, int]] = set()
    for panel in BOARDS[board]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    ids = [panel["id"] for panel in BOARDS[board]["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_panel_says_what_its_metrics_are():
    """In the words of the table, without their links."""
    for _, panel in panels():
        assert panel["description"].startswith("`baton_")
        assert "](" not in panel["description"]


def test_the_table_is_read_with_its_links_as_words():
    metric = read_metrics()["baton_blocks_quarantined"]
    assert metric == Metric("baton_blocks_quarantined", "gauge", frozenset({"worker", "role"}), "blocks in quarantine")


def boards_of(helm: Helm, *options: str) -> dict[str, Any]:
    """The boards that a release ships, by the names of their files."""
    manifests = helm.render(None, "--set", "monitoring.dashboard.enabled=true", *options)
    (manifest,) = of_kind(manifests, "ConfigMap").values()
    assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
    return {file: json.loads(text) for file, text in manifest["data"].items()}


def test_boards_are_for_grafanas_sidecar_and_have_names_that_no_other_release_has(helm: Helm):
    """Grafana replaces a board by another one of its uid, and the sidecar a file by another one of its name."""
    ours, others = boards_of(helm), boards_of(helm, "--namespace", "other")
    assert set(ours) == {f"default-demo-baton-{name}" for name in FILES}
    every = [*ours.values(), *others.values()]
    for key in ("uid", "title"):
        assert len({board[key] for board in every}) == 2 * len(FILES)
    assert not set(ours) & set(others)
    assert all(len(board["uid"]) <= 40 for board in every)  # as Grafana wants it


def test_boards_of_a_release_link_to_each_other_and_begin_with_their_namespace(helm: Helm):
    for file, shown in boards_of(helm, "--namespace", "chats").items():
        written = BOARDS[file.removeprefix("chats-demo-baton-")]
        assert {key for key in shown if shown[key] != written[key]} == {"uid", "title", "tags", "links", "templating"}
        assert shown.keys() == written.keys()
        assert [link["tags"] for link in shown["links"]] == [["chats-demo-baton"]]
        assert "chats-demo-baton" in shown["tags"]
        (namespace,) = (each for each in shown["templating"]["list"] if each["name"] == "namespace")
        assert namespace["current"] == {"text": "chats", "value": "chats"}


def test_a_folder_of_grafana_is_an_annotation(helm: Helm):
    options = ("--set", "monitoring.dashboard.enabled=true,monitoring.dashboard.annotations.grafana_folder=Baton")
    (manifest,) = of_kind(helm.render(None, *options), "ConfigMap").values()
    assert manifest["metadata"]["annotations"] == {"grafana_folder": "Baton"}
