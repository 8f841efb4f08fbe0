"""The pages of latency and of the cache."""

import time

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
