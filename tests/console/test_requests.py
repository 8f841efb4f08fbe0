"""The pages of requests, of a real stack: the list, and one request's time."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.console.asking import ask
from tests.console.browser import Browser
from tests.console.conftest import console
from tests.console.made_up import Json, MadeUpFeed
from tests.console.stand_in import serving
from tests.e2e.stack import Stack

MS_WIDE = 0.05  # how far sums of rounded figures may be from their whole


def record(stack: Stack, request_id: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(stack.gateway.get(f"/debug/requests/{request_id}")[1])
    return described


def test_a_request_appears_in_the_list_and_leads_to_its_page(browser: Browser, stack: Stack):
    browser.open(console(stack.gateway, "requests"))
    request_id = ask(stack.gateway, num_tokens=3)
    browser.wait_for(f".request-row a[title='{request_id}']")
    browser.find(f".request-row a[title='{request_id}']").click()
    browser.wait_for("h1", request_id)
    browser.wait_for(".told", "status 200")
    browser.wait_for(".told", "finish reason length")
    assert browser.errors() == []


@pytest.mark.long
def test_a_slow_request_s_timeline_adds_up_to_its_time(browser: Browser, stack: Stack):
    """The sum of the phases is the record's duration, which is within the time that the client waited."""
    browser.open(console(stack.gateway, "requests"))
    began = time.monotonic()
    request_id = ask(stack.gateway, "slow " * 200, num_tokens=400)
    waited_ms = (time.monotonic() - began) * 1e3
    browser.go(f"requests/{request_id}")
    browser.wait_for("table.phases tfoot")
    shown_sum = float(browser.find("[data-sum]").get_attribute("data-sum") or 0)
    whole = record(stack, request_id)
    assert abs(shown_sum - whole["duration_ms"]) < MS_WIDE
    assert shown_sum <= waited_ms
    phases = browser.texts("table.phases tbody th")
    assert phases == [name for name in whole["phases_ms"] if name != "handoff"]
    lanes = browser.texts(".lane-name")
    workers = whole["attempts"][0]["workers"]
    assert lanes[1:] == ["gateway", *(f"{worker['role']} {worker['worker']}" for worker in workers)]
    chosen = browser.texts("tr[data-verdict=chosen] td:nth-child(2)")
    assert sorted(chosen) == sorted(worker["worker"] for worker in workers)
    assert len(browser.all("tr[data-verdict]")) == len(whole["attempts"][0]["candidates"]) == 3
    assert browser.errors() == []


@pytest.mark.long
def test_a_request_that_a_worker_s_death_held_up_shows_both_attempts(browser: Browser, stack: Stack):
    """Its phases still add up to its time."""
    browser.open(console(stack.gateway, "requests"))
    request_id = "killed-beneath-it"
    with stack.gateway.client.completions.with_streaming_response.create(
        model="tiny",
        prompt="on and on " * 20,
        max_tokens=600,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": request_id},
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        decode = record(stack, request_id)["attempts"][0]["workers"][-1]["worker"]
        name = next(name for name, port in stack.ports.items() if decode.endswith(f":{port}"))
        stack.workers[name].kill()
        assert list(lines)
    stack.heal()
    browser.go(f"requests/{request_id}")
    browser.wait_for(".attempt[data-attempt='2']")
    assert len(browser.all(".attempt")) == 2
    shown_sum = float(browser.find("[data-sum]").get_attribute("data-sum") or 0)
    assert abs(shown_sum - record(stack, request_id)["duration_ms"]) < MS_WIDE
    assert browser.errors() == []


def test_filters_leave_what_passes_them(browser: Browser, stack: Stack):
    good = ask(stack.gateway, num_tokens=2)
    browser.open(console(stack.gateway, "requests"))
    browser.wait_for(f".request-row a[title='{good}']")
    assert browser.texts(".filters [role=status]") == [""]
    text = browser.find(".filters input[type=search]")
    text.send_keys(good[5:20])
    browser.wait_until(lambda: len(shown_ids(browser)) == 1, "one row")
    assert browser.texts(".filters [role=status]") == browser.texts(".filters .how-many")  # a change is read aloud
    assert shown_ids(browser) == [good]
    assert good[5:20] in browser.run("return location.hash")  # so that it can be sent to somebody
    browser.find(".filters input[type=number]").send_keys("100000")  # slower than 100 s
    browser.wait_for(".empty", "No request passes these filters")


def shown_ids(browser: Browser) -> list[str]:
    script = """return Array.from(document.querySelectorAll(".space .request-row:not([hidden]) a"), (a) => a.title)"""
    ids: list[str] = browser.run(script)
    return ids


def test_the_list_is_walked_with_the_keyboard(browser: Browser, stack: Stack):
    """It is one stop of the Tab key; arrows go from row to row, Enter opens one."""
    for _ in range(3):
        ask(stack.gateway, num_tokens=1)
    browser.open(console(stack.gateway, "requests"))
    browser.wait_until(lambda: len(shown_ids(browser)) >= 3, "three rows")
    ids = shown_ids_by_place(browser)
    assert len(browser.all(".space .request-row a[tabindex='0']")) == 1
    browser.find(".space a[tabindex='0']").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    focused = browser.driver.switch_to.active_element
    assert focused.get_attribute("title") == ids[2]
    focused.send_keys(Keys.ENTER)
    browser.wait_for("h1", ids[2])


def shown_ids_by_place(browser: Browser) -> list[str]:
    script = """return Array.from(document.querySelectorAll(".space .request-row:not([hidden])"))
      .sort((a, b) => a.getAttribute("aria-rowindex") - b.getAttribute("aria-rowindex"))
      .map((row) => row.querySelector("a").title)"""
    ids: list[str] = browser.run(script)
    return ids


@pytest.mark.long
def test_thousands_of_requests_are_a_few_elements(browser: Browser):
    """And each of them is reached: the last row is the oldest request."""
    feed = MadeUpFeed(time.time(), num_requests=5000)
    with serving(feed) as stand_in:
        browser.open(f"{stand_in.url}#/requests")
        browser.wait_for(".filters .how-many", "5,0")
        assert len(browser.all(".space .request-row")) < 100
        browser.find(".space a[tabindex='0']").send_keys(Keys.END)
        browser.wait_until(lambda: last_row(browser) >= 5000, "the last row")
        assert len(browser.all(".space .request-row")) < 100
        browser.wait_for(".fresh", "new request")  # the list stands still for who has scrolled
        browser.find(".fresh").click()
        assert "scroller" in (browser.driver.switch_to.active_element.get_attribute("class") or "")
        browser.wait_until(lambda: first_row(browser) == 2, "the newest row, after the headings")
        browser.driver.get("about:blank")


def shown_rows(browser: Browser) -> list[int]:
    script = """return Array.from(document.querySelectorAll(".space .request-row:not([hidden])"),
      (row) => Number(row.getAttribute("aria-rowindex")))"""
    rows: list[int] = browser.run(script)
    return rows


def first_row(browser: Browser) -> int:
    return min(shown_rows(browser))


def last_row(browser: Browser) -> int:
    return max(shown_rows(browser))


@dataclass
class RestartedFeed(MadeUpFeed):
    """A feed that begins anew once it is told to, as that of another gateway: its numbers were others' before."""

    restarts: bool = False

    def beginning(self) -> Iterator[tuple[str, Json]]:
        self._number = 0
        yield from super().beginning()

    def next_second(self) -> Iterator[tuple[str, Json]]:
        yield from super().next_second()
        if self.restarts:
            self.restarts = False
            yield from self.beginning()


@pytest.mark.long
def test_a_list_that_stood_still_begins_anew_with_another_gateway(browser: Browser):
    """No row is taken for another one that had its number."""
    feed = RestartedFeed(time.time(), num_requests=4)
    with serving(feed) as stand_in:
        browser.open(f"{stand_in.url}#/requests")
        browser.wait_until(lambda: len(shown_ids(browser)) >= 4, "rows")
        browser.press("Pause")
        before = set(shown_ids(browser))
        feed.restarts = True
        browser.wait_until(lambda: before.isdisjoint(shown_ids(browser)), "the other gateway's rows")
        browser.wait_until(lambda: len(shown_ids(browser)) == 4, "all of them")
        browser.wait_for(".fresh", "new request")
        assert len(shown_ids(browser)) == 4
        assert browser.errors() == []
        browser.driver.get("about:blank")


@dataclass
class EndingFeed(MadeUpFeed):
    """A feed whose requests in flight end a second later."""

    under_way: Json | None = None

    def next_second(self) -> Iterator[tuple[str, Json]]:
        for name, data in super().next_second():
            if name == "requests":
                rows, self.under_way = [*data["rows"], *self._ended()], data["rows"][0]
                yield name, {"rows": rows}
            else:
                yield name, data

    def _ended(self) -> list[Json]:
        return [] if self.under_way is None else [{**self.under_way, "state": "done", "phase": None, "ms": 1000.0}]


@pytest.mark.long
def test_a_paused_list_keeps_the_rows_that_its_filter_would_not_let_pass_any_more(browser: Browser):
    with serving(EndingFeed(time.time(), num_requests=1)) as stand_in:
        browser.open(f"{stand_in.url}#/requests?state=in+flight")
        browser.wait_until(lambda: shown_ids(browser), "a row")
        browser.press("Pause")
        (shown,) = shown_ids(browser)
        browser.wait_for(".space .request-row .badge", "done")
        assert shown_ids(browser) == [shown]
        browser.driver.get("about:blank")


def test_a_number_of_another_request_is_not_taken_for_this_one(browser: Browser):
    """Where a record is not kept, the list may know the request: by its id, and its number."""
    feed = MadeUpFeed(time.time(), num_requests=3)
    with serving(feed) as stand_in:
        browser.open(f"{stand_in.url}#/requests")
        browser.wait_until(lambda: len(shown_ids(browser)) >= 3, "rows")
        request_id = shown_ids(browser)[0]
        browser.go("requests/some-other?n=2")
        browser.wait_for(".why", "Nothing is here")
        assert browser.texts(".figure") == []
        browser.go(f"requests/{request_id}")
        browser.wait_for(".told", "the list of requests still has this")
        browser.driver.get("about:blank")
