"""The page of the fleet, of a real stack: a handoff is seen, and a worker that is killed."""

import time

import pytest

from tests.console.asking import ask, asking
from tests.console.browser import NARROW, Browser
from tests.console.conftest import console
from tests.e2e.stack import Stack

DOTS_COME_S = 1.5  # after the tick that tells of handoffs
DOTS = """
window.dots = 0;
new MutationObserver((changes) => { for (const change of changes) window.dots += change.addedNodes.length; })
  .observe(document.querySelector(".dots"), { childList: true });
"""


def address(stack: Stack, name: str) -> str:
    return f"127.0.0.1:{stack.ports[name]}"


def test_every_worker_has_a_card_with_its_role_and_state(browser: Browser, stack: Stack):
    browser.open(console(stack.gateway))
    browser.wait_for("article.card[data-role=prefill] h3", address(stack, "prefill-0"))
    for name in ("decode-0", "decode-1"):
        browser.wait_for("article.card[data-role=decode] h3", address(stack, name))
    assert browser.texts("article.card[data-role] .badge") == ["ok"] * 3
    assert browser.errors() == []
    assert browser.hosts() == {f"127.0.0.1:{stack.gateway.admin_port}"}
    assert browser.run("return window.violations") == []


def test_a_handoff_is_seen(browser: Browser, stack: Stack):
    """As a dot on its way between two workers, and as a number in the table of links."""
    browser.open(console(stack.gateway))
    browser.wait_for("article.card[data-role=decode]")
    browser.run(DOTS)
    with asking(stack.gateway):
        browser.wait_until(lambda: browser.run("return window.dots") > 0, "a dot")
        browser.wait_for(".links-drawing .rate", "handoffs/s")
        row = browser.texts("table tbody tr")[0].split("\t")
    assert row[0] == address(stack, "prefill-0")
    assert row[1] in (address(stack, "decode-0"), address(stack, "decode-1"))
    assert int(row[4]) >= 1  # handoffs
    assert browser.errors() == []


@pytest.mark.long
def test_who_wants_no_motion_sees_none(browser: Browser, stack: Stack):
    """The figures still say that handoffs happen."""
    browser.open(console(stack.gateway), still=True)
    browser.wait_for("article.card[data-role=decode]")
    browser.run(DOTS)
    with asking(stack.gateway):
        browser.wait_for(".links-drawing .rate", "handoffs/s")
        time.sleep(DOTS_COME_S)
    assert browser.run("return window.dots") == 0


@pytest.mark.long
def test_a_killed_worker_turns_red_and_comes_back(browser: Browser, stack: Stack):
    """On its card, in the drawing, and in the list of what is unhealthy, by colour and by word."""
    gone = address(stack, "decode-1")
    card, node = f"article.card[id='worker-{gone}']", f".node[data-worker='{gone}']"
    browser.open(console(stack.gateway))
    browser.wait_for(f"{card}[data-tone=good] .badge", "ok")
    stack.workers["decode-1"].kill()
    try:
        browser.wait_for(f"{card}[data-tone=bad] .badge", "gone")
        browser.wait_for(".unhealthy li", gone)
        assert browser.all(f"{node}[data-tone=bad]")
        red = browser.run("return getComputedStyle(document.querySelector(arguments[0])).borderTopColor", card)
        assert red == "rgb(187, 36, 36)"
        assert "UNAVAILABLE" not in browser.texts(f"{card} .why")[0]  # in words; gRPC's are a hint
        assert "UNAVAILABLE" in (browser.find(f"{card} .why span").get_attribute("title") or "")
    finally:
        stack.heal()
    browser.wait_for(f"{card}[data-tone=good] .badge", "ok")
    browser.wait_for(".fine", "Everything is healthy")
    assert browser.all(f"{node}[data-tone=good]")
    browser.wait_until(lambda: gone_by(browser, gone) is not None, "the event of its end")
    assert browser.errors() == []


def gone_by(browser: Browser, address: str) -> str | None:
    """What the event says by which this worker went; None: there is no such event."""
    found = (text for text in browser.texts(".events li") if address in text and "worker gone" in text)
    return next(found, None)


@pytest.mark.long
def test_pages_are_as_wide_as_a_telephone(browser: Browser, stack: Stack):
    """Nothing is wider than the window, on any page."""
    browser.open(console(stack.gateway), width=NARROW)
    request_id = ask(stack.gateway, num_tokens=2)
    for page in ("fleet", "requests", "cache", "latency", "playground", f"requests/{request_id}"):
        browser.go(page)
        assert browser.run("return document.documentElement.scrollWidth") <= NARROW, page
    assert browser.errors() == []
