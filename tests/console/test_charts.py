"""The pages of latency and of the cache, and what the modules behind them compute."""

import statistics
import time
from itertools import pairwise

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


def test_slo_attainment_is_shown_where_there_is_an_slo(browser: Browser, keyed: Keyed):
    browser.open(console(keyed.gateway, "latency"))
    enter(browser, keyed.keys.operator)
    ask(keyed.gateway, num_tokens=2, key=keyed.keys.acme)
    browser.wait_for("#slo-head", "SLO attainment")
    browser.wait_for("section[aria-labelledby=slo-head] .figure dd", "100 %")
    assert browser.errors(ASKED) == []


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
        browser.go("cache")
        browser.wait_for(".chart table tbody tr td", "%")
        assert not any("plotly" in url for url in browser.asked)
        assert browser.errors() == []
        browser.driver.get("about:blank")


def test_percentiles_of_a_histogram_are_close_to_those_of_its_values(browser: Browser, stack: Stack):
    """Within half a bucket, whatever lies above the last bound."""
    browser.open(console(stack.gateway, "latency"))
    values = [0.001 * 1.05**number for number in range(200)]
    bounds = [0.001 * 1.2**power for power in range(60)]
    counts = [sum(low < value <= high for value in values) for low, high in pairwise([0, *bounds, 1e9])]
    for share, exact in ((0.5, statistics.median(values)), (0.9, values[179]), (0.99, values[197])):
        found = browser.run_module("percentiles.js", f"module.percentile({counts}, {bounds}, {share})")
        assert abs(found - exact) < 0.1 * exact
    assert browser.run_module("percentiles.js", "module.percentile([0, 0, 7], [1, 2], 0.5)") == 2
    assert browser.run_module("percentiles.js", "module.percentile([0, 0, 0], [1, 2], 0.5)") is None
