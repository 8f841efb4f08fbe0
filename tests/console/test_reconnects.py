"""A console whose gateway goes away says so, and goes on by itself when it is back."""

import re
import time

import pytest

from tests.console.browser import Browser
from tests.console.conftest import console
from tests.console.made_up import MadeUpFeed
from tests.console.stand_in import serving
from tests.e2e.stack import Stack

# The browser itself logs each connection that is refused or cut off.
CUT_OFF = "net::ERR_"


@pytest.mark.long
def test_a_feed_that_ends_is_told_and_followed_again(browser: Browser):
    """What was seen last stays, and a button tries again at once."""
    feed = MadeUpFeed(time.time(), num_requests=3)
    with serving(feed) as stand_in:
        browser.open(f"{stand_in.url}#/fleet")
        browser.wait_for(".feed .badge", "live")
        port = stand_in.server_port
    browser.wait_for(".feed .badge", "not connected")
    browser.wait_for(".feed-words", "next try in")
    assert " old, " in browser.texts(".feed-words")[0]
    assert len(browser.all("article.card[data-role]")) == feed.num_prefill + feed.num_decode
    browser.wait_until(
        lambda: re.search(r"next try in ([6-9]|\d\d) s", browser.texts(".feed-words")[0]), "a late next try"
    )
    with serving(feed, port):
        browser.press("Try now")  # which is there until that try
        assert browser.driver.switch_to.active_element.get_attribute("class") == "feed"  # the button is gone
        browser.wait_for(".feed .badge", "live")
        assert browser.errors(CUT_OFF) == []
        browser.driver.get("about:blank")


@pytest.mark.long
def test_a_gateway_that_dies_is_found_again(browser: Browser, stack: Stack):
    with stack.serving() as gateway:
        browser.open(console(gateway))
        browser.wait_for(".feed .badge", "live")
        gateway.kill()
        browser.wait_for(".feed .badge", "not connected")
        gateway.start()
        browser.wait_for(".feed .badge", "live", timeout_s=60)
        assert browser.errors(CUT_OFF) == []


@pytest.mark.long
def test_a_frozen_gateway_is_told_as_stale(browser: Browser, stack: Stack):
    """Its connection still stands, and nothing comes."""
    with stack.serving() as gateway:
        browser.open(console(gateway))
        browser.wait_for(".feed .badge", "live")
        gateway.process.freeze()
        try:
            browser.wait_for(".feed .badge", "stale")
            browser.wait_for(".feed-words", "last word")
        finally:
            gateway.process.thaw()
        browser.wait_for(".feed .badge", "live")
        assert browser.errors(CUT_OFF) == []
