"""Keys in the console: who is asked for one, what a tenant sees, and where a key may be."""

import pytest

from tests.console.asking import ask
from tests.console.browser import Browser
from tests.console.conftest import PLAIN, Keyed, console, console_at_api
from tests.console.test_requests import shown_ids

# The browser itself logs each answer that is 401, which is how a page learns that a key is wanted.
ASKED = "the server responded with a status of 401"


def enter(browser: Browser, key: str) -> None:
    browser.wait_for("form.key-form")
    browser.find("form.key-form input").send_keys(key)
    browser.find("form.key-form button").click()


@pytest.mark.long
def test_two_tenants_see_their_own_requests_alone(browser: Browser, keyed: Keyed):
    gateway, keys = keyed.gateway, keyed.keys
    own = {key: ask(gateway, num_tokens=2, key=key) for key in (keys.acme, keys.other)}
    for key, other in ((keys.acme, keys.other), (keys.other, keys.acme)):
        browser.open(console_at_api(gateway))
        enter(browser, key)
        browser.wait_for(f".request-row a[title='{own[key]}']")
        assert own[other] not in shown_ids(browser)
        assert browser.texts("#head nav a") == ["Requests", "Cache", "Latency", "Playground"]
        browser.go(f"requests/{own[other]}")  # guessed
        browser.wait_for(".why", "None of the last")
        browser.go(f"requests/{own[key]}")
        browser.wait_for("table.phases tfoot")
        assert browser.all("tr[data-verdict]") == []  # what others cost is not theirs to see
        told = browser.run("return document.body.innerText")
        assert "No worker has brought" not in told, "a key that may not know them is told nothing of workers"
        assert "undefined" not in told
        browser.run("location.hash = '#/fleet'")
        browser.wait_for("h1", "Requests")


@pytest.mark.long
def test_a_key_is_in_no_address_and_nothing_keeps_it_beyond_the_tab(browser: Browser, keyed: Keyed):
    browser.open(console(keyed.gateway))
    enter(browser, PLAIN)
    browser.wait_for("article.card[data-role=decode]")
    for page in ("requests", "playground", "latency", "cache", "fleet"):
        browser.go(page, "main h1")  # nobody may have asked for anything so far
    assert browser.errors(ASKED) == []
    assert browser.asked
    assert not any(PLAIN in url for url in browser.asked)
    assert PLAIN not in browser.run("return location.href + document.cookie + JSON.stringify({...localStorage})")
    assert browser.run("return JSON.stringify({...sessionStorage})").count(PLAIN) == 1
    browser.find(".head-end button:nth-of-type(2)").click()  # remove the key
    browser.wait_for("form.key-form")
    assert browser.run("return JSON.stringify({...sessionStorage})") == "{}"


def test_a_wrong_key_is_told_and_another_may_be_entered(browser: Browser, keyed: Keyed):
    browser.open(console(keyed.gateway))
    enter(browser, "no-such-key")
    browser.wait_for("form.key-form .note", "does not take this key")
    browser.wait_for("#head button", "Remove key")
    enter(browser, "ключ")  # which no header can have
    browser.wait_for("form.key-form .note", "This cannot be a key")
    browser.find("form.key-form input").clear()
    enter(browser, keyed.keys.operator)
    browser.wait_for("article.card[data-role=decode]")
