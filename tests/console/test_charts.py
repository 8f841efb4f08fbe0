"""The pages of latency and of the cache."""

import json
import statistics
import time

import pytest

from tests.console.asking import ask
from tests.console.browser import Browser
from tests.console.conftest import Keyed, console
from tests.console.made_up import MadeUpFeed
from tests.console.stand_in import serving
from tests.console.test_tenants import ASKED, enter
from tests.e2e.stack import Stack


def test_latency_of_a_real_stack_is_shown_as_charts_and_tables(browser: Browser, stack: Stack):
    """Every request that was counted is in the figures; its policy lets the page draw them."""
    browser.open(console(stack.gateway, "latency"))
    for _ in range(3):
        ask(stack.gateway, num_tokens=4)
    counted = "[data-measure=ttft] .figure:first-child dd"
    browser.wait_until(lambda: browser.texts(counted)[0] not in ("", "0"), "figures")
    browser.wait_for("[data-measure=ttft] .plot .main-svg")
    browser.wait_for("[data-measure=e2e] .plot .heatmaplayer")
    assert browser.errors() == []
    assert browser.run("return window.violations") == []
    assert browser.hosts() == {f"127.0.0.1:{stack.gateway.admin_port}"}


def milliseconds(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def figures(browser: Browser, within: str) -> dict[str, str]:
    """Figures of a part of a page, by their names."""
    return dict(zip(browser.texts(f"{within} .figure dt"), browser.texts(f"{within} .figure dd"), strict=True))


@pytest.mark.long
def test_figures_of_pages_are_those_of_the_records(browser: Browser, stack: Stack):
    """Times within 5 %, since histograms have buckets and people read three digits; tokens exactly."""
    with stack.serving() as gateway:
        for number in range(7):
            ask(gateway, f"{number} and so on " * (5 + number), num_tokens=5 * (1 + number))
        records = json.loads(gateway.get("/debug/requests")[1])["requests"]
        browser.open(console(gateway, "latency"))
        browser.wait_until(lambda: figures(browser, "[data-measure=e2e]").get("Counted") == "7", "seven requests")
        for measure, field in (("ttft", "ttft_ms"), ("e2e", "duration_ms")):
            shown = figures(browser, f"[data-measure={measure}]")
            times = sorted(record[field] for record in records)
            assert milliseconds(shown["Mean"]) == pytest.approx(statistics.mean(times), rel=0.05)
            assert times[2] / 1.2 < milliseconds(shown["p50"]) < times[4] * 1.2
        browser.go("cache")
        shown = figures(browser, "main")
        assert int(shown["Prompt tokens"]) == sum(record["prompt_tokens"] for record in records)
        assert int(shown["Of them cached"]) == sum(record["cached_tokens"] for record in records)


@pytest.mark.long
def test_slo_attainment_is_shown_where_there_is_an_slo(browser: Browser, keyed: Keyed):
    browser.open(console(keyed.gateway, "latency"))
    enter(browser, keyed.keys.operator)
    ask(keyed.gateway, num_tokens=2, key=keyed.keys.acme)
    browser.wait_for("#slo-head", "SLO attainment")
    browser.wait_for("section[aria-labelledby=slo-head] .figure dd", "100 %")
    assert browser.errors(ASKED) == []


@pytest.mark.long
def test_the_cache_s_hit_rate_is_that_of_the_requests(browser: Browser, stack: Stack):
    browser.open(console(stack.gateway, "cache"))
    for _ in range(3):
        ask(stack.gateway, "a beginning that all of them share " * 20, num_tokens=2)
    browser.wait_until(lambda: "%" in " ".join(browser.texts(".figures dd")), "a hit rate")
    browser.wait_for(".chart .plot .main-svg")
    browser.wait_for("table.prefixes tbody tr")
    assert browser.errors() == []


def test_without_plotly_tables_have_the_figures_and_the_page_says_what_to_install(browser: Browser):
    with serving(MadeUpFeed(time.time(), num_requests=10, has_plotly=False)) as stand_in:
        browser.open(f"{stand_in.url}#/latency")
        browser.wait_for(".note", "pip install")
        browser.wait_for("[data-measure=ttft] table tbody tr td", "ms")
        browser.go("cache", ".chart table tbody tr td")
        browser.wait_for(".chart table tbody tr td", "%")
        assert not any("plotly" in url for url in browser.asked)
        assert browser.errors() == []
        browser.driver.get("about:blank")
