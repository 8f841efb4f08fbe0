"""The rules of axe for accessible pages: none that is serious is broken, on any page, in any theme, at any width."""

import json
from typing import Any

import pytest

from tests.clients.environments import NAMED, node
from tests.console.asking import ask
from tests.console.browser import NARROW, WIDE, Browser
from tests.console.conftest import Keyed, console
from tests.console.test_playground import send
from tests.e2e.stack import Stack
from tests.machine import miss

SERIOUS = ("serious", "critical")
RUN = """const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations));"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The program, which is put into pages."""
    found = node(NAMED)
    program = None if found is None else found.home / "node_modules" / "axe-core" / "axe.min.js"
    if program is None or not program.exists():
        miss("axe-core is not installed: `make test-clients` does")
    return program.read_text()


def serious(browser: Browser, axe: str) -> list[str]:
    """What breaks a rule: the rule, and where."""
    browser.run(axe)
    found: list[dict[str, Any]] = browser.driver.execute_async_script(RUN)
    return [
        f"{rule['id']}: {json.dumps([each['target'] for each in rule['nodes']])} {rule['nodes'][0]['failureSummary']}"
        for rule in found
        if rule["impact"] in SERIOUS
    ]


LOOKS = [
    (WIDE, "light"),
    *(pytest.param(*look, marks=pytest.mark.long) for look in ((WIDE, "dark"), (NARROW, "light"), (NARROW, "dark"))),
]


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_no_page_breaks_a_serious_rule(browser: Browser, stack: Stack, axe: str, theme: str, width: int):
    request_id = ask(stack.gateway, num_tokens=4)
    browser.open(console(stack.gateway), theme=theme, width=width)
    for page in ("fleet", "requests", f"requests/{request_id}", "cache", "latency", "playground"):
        browser.go(page)
        if page == "playground":
            browser.fill("Most tokens", "4")
            browser.field("Logprobs, as colours").click()
            send(browser, "Hello")
            browser.wait_for(".served", "generated")
        assert serious(browser, axe) == [], page


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_the_form_for_a_key_breaks_none(browser: Browser, keyed: Keyed, axe: str, theme: str):
    browser.open(console(keyed.gateway), theme=theme)
    browser.wait_for("form.key-form")
    assert serious(browser, axe) == []


def test_a_broken_rule_is_found(browser: Browser, stack: Stack, axe: str):
    browser.open(console(stack.gateway, "requests"))
    browser.wait_for("h1")
    browser.run("""const image = document.createElement("img"); image.src = "icon.svg"; document.body.append(image)""")
    assert any(found.startswith("image-alt") for found in serious(browser, axe))
