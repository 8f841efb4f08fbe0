"""The pages' pure functions, which run in the browser as the pages have them."""

import json
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.console.browser import Browser
from tests.console.made_up import BOUNDS, MadeUpFeed
from tests.console.stand_in import serving


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Browser]:
    with serving(MadeUpFeed(time.time(), num_requests=3)) as stand_in:
        browser.open(f"{stand_in.url}#/requests")
        yield browser
        browser.driver.get("about:blank")


def js(value: object) -> str:
    return json.dumps(value)


def test_percentiles_of_a_histogram_are_close_to_those_of_its_values(page: Browser):
    """Within half a bucket; what lies above the last bound is at least that bound."""
    values = [0.001 * 1.05**number for number in range(200)]
    counts = [sum(low < value <= high for value in values) for low, high in pairwise([0, *BOUNDS, 1e9])]
    for share, exact in ((0.5, statistics.median(values)), (0.9, values[179]), (0.99, values[197])):
        found = page.run_module("percentiles.js", f"module.percentile({js(counts)}, {js(BOUNDS)}, {share})")
        assert abs(found - exact) < 0.1 * exact
    assert page.run_module("percentiles.js", "module.percentile([0, 0, 7], [1, 2], 0.5)") == 2
    assert page.run_module("percentiles.js", "module.percentile([0, 0, 0], [1, 2], 0.5)") is None


def test_a_time_without_samples_is_a_gap_and_not_a_long_step(page: Browser):
    samples = [{"at": at} for at in (100, 105, 130)]
    groups = page.run_module("percentiles.js", f"module.grouped({js(samples)}, 10)")
    assert [(group["at"], len(group["samples"])) for group in groups] == [(100, 2), (110, 0), (120, 0), (130, 1)]


def tick(now: float, **totals: int) -> dict[str, Any]:
    return {"now": now, "links": [{"prefill": "p", "decode": "d", "handoffs": 0, "failed": 0, "bytes": 0, **totals}]}


def test_a_link_moved_what_its_totals_grew_by(page: Browser):
    """Totals that shrank began anew: a worker or the gateway was restarted."""
    grew = [tick(10, handoffs=5, bytes=100), tick(12, handoffs=9, bytes=180)]
    began_anew = [tick(10, handoffs=5, bytes=100), tick(12, handoffs=2, bytes=40)]
    for (before, after), handoffs, moved in ((grew, 4, 80), (began_anew, 2, 40)):
        found = page.run_module("moved.js", f"[...module.movedBetween({js(before)}, {js(after)}).values()]")
        assert found == [{"seconds": 2, "handoffs": handoffs, "failed": 0, "bytes": moved}]
    assert page.run_module("moved.js", f"module.movedBetween(null, {js(tick(10, handoffs=5))}).size") == 0


def test_a_request_that_failed_before_its_first_token_has_a_phase_for_the_rest(page: Browser):
    """So its timeline adds up too."""
    record = {"duration_ms": 2005.0, "phases_ms": {"read": 1.0, "tokenize": 4.0}, "attempts": [], "workers": None}
    spans = page.run_module("timeline_spans.js", f"module.phaseSpans({js(record)})")
    assert [(phase["name"], phase["ms"]) for phase in spans["phases"]] == [("read", 1), ("tokenize", 4), ("rest", 2000)]
    assert spans["sum"] == spans["total"] == 2005


def test_a_tenant_s_samples_are_made_of_its_own_rows(page: Browser):
    rows = [
        {"n": 2, "state": "done", "at": 103.0, "ms": 900.0, "ttft_ms": 200.0, "prompt": 30, "cached": 16},
        {"n": 1, "state": "done", "at": 101.0, "ms": 500.0, "ttft_ms": None, "prompt": 10, "cached": 0},
        {"n": 0, "state": "in flight", "at": 100.0, "ms": None, "ttft_ms": 100.0, "prompt": 9, "cached": 0},
    ]
    bounds = {"ttft": [0.1, 1], "e2e": [0.6, 1]}
    (sample,) = page.run_module("own_samples.js", f"module.ownSamples({js(rows)}, {js(bounds)}, 5, 104)")
    assert sample["at"] == 105
    assert (sample["prompt_tokens"], sample["cached_tokens"]) == (40, 16)
    assert (sample["ttft"], sample["e2e"]) == ([0, 1, 0], [1, 1, 0])


def test_a_tenant_s_quiet_times_are_samples_too(page: Browser):
    """Else tokens a second would be those of the steps that have a request."""
    ended = {"state": "done", "ms": 1000.0, "ttft_ms": 200.0, "prompt": 600, "cached": 0}
    rows = [{"n": 2, "at": 151.0, **ended}, {"n": 1, "at": 101.0, **ended}, {"n": 0, "at": 9e9, **ended}]
    own = f"module.ownSamples({js(rows)}, {js({'ttft': [1], 'e2e': [1]})}, 5, 161)"
    samples = page.run_module("own_samples.js", own)
    assert [sample["at"] for sample in samples] == [*range(105, 165, 5)]
    assert [sample["prompt_tokens"] for sample in samples if sample["prompt_tokens"]] == [600, 600]
    (group,) = page.run_module("percentiles.js", f"module.grouped({js(samples)}, 600)")
    chart = page.run_module("cache_charts.js", f"module.promptTokens([{js(group)}])")
    assert chart["lines"][0]["values"] == [1200 / 60]


def test_the_age_of_what_is_seen_is_counted_from_the_last_event(page: Browser):
    """However often the feed is tried again after it."""
    seen = page.run_module(
        "feed.js",
        """new Promise((resolve) => {
            const answers = [() => new Response('event: tick\\ndata: {}\\n\\n')];
            const get = async () => (answers.pop() ?? (() => { throw new TypeError(); }))();
            const [waiting, heard] = [[], []];
            const feed = new module.Feed({ get }, () => heard.push(Date.now()), (state) => {
              if (state.kind !== "waiting") return;
              waiting.push(state);
              if (waiting.length === 3) { feed.stop(); resolve({ waiting, heard }); }
              else setTimeout(() => feed.start(), 30);
            });
            feed.start();
        })""",
    )
    (since,) = {state["since"] for state in seen["waiting"]}
    assert since <= seen["heard"][0]


def test_a_listener_that_fails_keeps_nothing_from_the_others(page: Browser):
    told = page.run_module(
        "store.js",
        """(() => {
            const store = new module.Store();
            let told = 0;
            store.on("prefixes", () => { throw new Error("of the test"); });
            store.on("prefixes", () => { told += 1; });
            store.take("prefixes", { prefixes: [] });
            return told;
        })()""",
    )
    assert told == 1
    assert any("of the test" in error for error in page.errors())


def test_a_tenant_s_samples_are_told_once_a_step(page: Browser):
    """No event of the feed tells of them: they are made of rows, and a quiet step is one too."""
    told = page.run_module(
        "store.js",
        """(() => {
            const store = new module.Store();
            const history = { step_s: 5, bounds: {}, samples: [] };
            store.take("hello", { sees: "own", now: 100, history, requests: [], events: [] });
            const told = [];
            store.on("samples", () => told.push(store.tick.now));
            for (const now of [101, 102, 104.9, 105, 106, 111]) store.take("tick", { now });
            return told;
        })()""",
    )
    assert told == [101, 105, 111]


def test_a_restarted_gateway_s_share_of_a_processor_is_not_known_at_first(page: Browser):
    shown = page.run_module(
        "fleet_parts.js",
        """(() => {
            const card = module.gatewayCard();
            return [["a", 90], ["a", 90.5], ["b", 0.1], ["b", 0.2]].map(([id, cpu_s], second) => {
              card.show({ now: second, gateway: { id, cpu_s } });
              return /Processor(.*) of a core/.exec(card.element.textContent)[1];
            });
        })()""",
    )
    assert shown == ["–", "50 %", "–", "10 %"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "Not so."}}, "Not so."),
        ({"error": "Bad gateway"}, "Bad gateway"),  # a proxy's
        ({"error": {}}, "HTTP 502"),
        (None, "HTTP 502"),
    ],
)
def test_errors_have_words(page: Browser, body: object, words: str):
    found = page.run_module("session.js", f"module.errorWords(new Response({js(js(body))}, {{ status: 502 }}))")
    assert found == words


def test_a_list_that_is_shown_again_keeps_the_keyboard(page: Browser):
    """Also where elements change places, and where others go or come anew."""
    kept = page.run_module(
        "dom.js",
        """(() => {
            const parent = document.body.appendChild(document.createElement("div"));
            const part = (of) => ({ of, make: () => module.el("button", of) });
            const show = (...names) => module.showParts(parent, names.map(part));
            show("a", "b", "c");
            const button = parent.children[1];
            button.focus();
            const found = [["b", "c"], ["c", "b"], ["d", "b", "b"]].map((names) => {
              show(...names);
              return [document.activeElement === button, parent.textContent];
            });
            parent.remove();
            return found;
        })()""",
    )
    assert kept == [[True, "bc"], [True, "cb"], [True, "dbb"]]


def test_the_table_of_a_chart_stays_while_its_figures_change(page: Browser):
    """So it is scrolled, and read with the keyboard; other headings are another table."""
    same = page.run_module(
        "chart_tables.js",
        """(() => {
            const table = module.chartTable("A chart");
            const line = (name, ...values) => ({ times: [1, 2], words: String, lines: [{ name, values }] });
            const shown = [line("a", 1, 2), line("a", 3, 4), line("b", 5, 6)].map((data) => {
              table.show(data);
              return table.element.querySelector("[role=region]");
            });
            return [shown[0] === shown[1], shown[1] === shown[2], shown[1].innerText, shown[2].innerText];
        })()""",
    )
    assert same[:2] == [True, False]
    assert "3" in same[2]
    assert "6" in same[3]


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (["127.0.0.1:50051", "127.0.0.1:50052"], [":50051", ":50052"]),
        (["10.0.4.11:7101", "10.0.5.12:7201"], ["4.11:7101", "5.12:7201"]),
        (["prefill-0.chat:7101", "decode-0.chat:7201"], ["prefill-0.chat:7101", "decode-0.chat:7201"]),
        (["10.0.4.11:7101"], [":7101"]),
        ([], []),
    ],
)
def test_addresses_are_shown_without_what_they_have_in_common(page: Browser, addresses: list[str], names: list[str]):
    assert page.run_module("format.js", f"[...module.shortNames({js(addresses)}).values()]") == names


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, [3, 2, 1]),
        ({"state": "failed"}, [2]),
        ({"key": "acme"}, [3, 1]),
        ({"slow": "1500"}, [3, 1]),  # the one in flight for so long too
        ({"text": "B-1"}, [1]),
    ],
)
def test_filters(page: Browser, wanted: dict[str, str], numbers: list[int]):
    rows = [
        {"n": 3, "id": "a-3", "state": "in flight", "model": "m", "key": "acme", "at": 100, "ms": None},
        {"n": 2, "id": "a-2", "state": "failed", "model": "m", "key": None, "at": 99, "ms": 100},
        {"n": 1, "id": "b-1", "state": "done", "model": "m", "key": "acme", "at": 98, "ms": 2000},
    ]
    all_wanted = {"state": "", "model": "", "key": "", "slow": "", "text": "", **wanted}
    passing = f"module.passing({js(rows)}, {js(all_wanted)}, 102).map((row) => row.n)"
    assert page.run_module("request_filters.js", passing) == numbers
