"""A console whose gateway goes away says so, and goes on by itself when it is back."""

import signal

import pytest

from tests.console.browser import Browser
from tests.console.conftest import console
from tests.e2e.stack import Stack

# The browser itself logs each connection that is refused or cut off.
CUT_OFF = "net::ERR_"


@pytest.mark.long
def test_a_gateway_that_dies_makes_its_console_stale_and_is_found_again(browser: Browser, stack: Stack):
    with stack.serving() as gateway:
        browser.open(console(gateway))
        browser.wait_for(".feed .badge", "live")
        gateway.kill()
        browser.wait_for(".feed .badge", "not connected")
        browser.wait_for(".feed-words", "next try in")
        assert browser.texts("article.card[data-role]")  # what was seen last stays
        gateway.start()
        browser.wait_for(".feed .badge", "live", timeout_s=60)
        assert browser.errors(CUT_OFF) == []


def test_a_frozen_gateway_is_told_as_stale(browser: Browser, stack: Stack):
    """Its connection still stands, and nothing comes."""
    with stack.serving() as gateway:
        browser.open(console(gateway))
        browser.wait_for(".feed .badge", "live")
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            browser.wait_for(".feed .badge", "stale")
            browser.wait_for(".feed-words", "last word")
        finally:
            gateway.process.send_signal(signal.SIGCONT)
        browser.wait_for(".feed .badge", "live")
        assert browser.errors(CUT_OFF) == []
