"""The made-up feed has the form of a real one, so what a browser shows of it, it shows of a gateway too."""

import json
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from services.gateway.console.server_events import ROWS_AT_ONCE
from tests.console.asking import ask
from tests.console.made_up import MadeUpFeed
from tests.e2e.stack import Gateway, Stack

Event = tuple[str, dict[str, Any]]
NEEDED = {  # of a real feed; what else is in both is compared too
    "hello.history.samples.sums",
    "hello.history.bounds",
    "hello.requests",
    "hello.events",
    "tick.gateway",
    "tick.redis",
    "tick.workers.kv.device",
    "prefixes",
}


def real_events(gateway: Gateway) -> Iterator[Event]:
    """The events of a gateway's feed, up to the first tick after a sample was taken."""
    has_sample = False
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.admin_port}/console/feed", timeout=30) as answer:
        while name := answer.readline().decode().removeprefix("event: ").strip():
            data = json.loads(answer.readline().decode().removeprefix("data: "))
            answer.readline()
            yield name, data
            has_sample = has_sample or name == "sample" or bool(name == "hello" and data["history"]["samples"])
            if name == "tick" and has_sample:
                return


def forms(events: Iterable[Event]) -> dict[str, set[str]]:
    """The names of the fields of each object, by where it is; of objects in a list, those of the first."""
    found: dict[str, set[str]] = {}
    for name, data in events:
        _add_forms(found, {"requests": "hello.requests", "sample": "hello.history.samples"}.get(name, name), data)
    return found


def _add_forms(found: dict[str, set[str]], place: str, value: object) -> None:
    value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, dict) and value.keys() == {"rows"}:
        value = value["rows"][0]
    if not isinstance(value, dict):
        return
    found.setdefault(place, set(value))
    for name, inside in value.items():
        is_named_freely = name == "kv_used" or (name == "workers" and isinstance(inside, dict))  # by address, by role
        if not is_named_freely:
            _add_forms(found, f"{place}.{name}", inside)


def test_every_object_of_the_made_up_feed_has_the_fields_of_a_real_one(stack: Stack):
    ask(stack.gateway, num_tokens=4)
    feed = MadeUpFeed(time.time())
    made_up = forms([*feed.beginning(), *feed.next_second()])
    real = forms(real_events(stack.gateway))
    assert real.keys() >= NEEDED
    assert {place: fields for place, fields in real.items() if place in made_up and made_up[place] != fields} == {}
    assert {"requests", "sample"} & real.keys() == set()  # they were compared with those of the hello


def test_a_hello_has_so_many_rows_and_older_ones_follow():
    events = list(MadeUpFeed(time.time(), num_requests=2 * ROWS_AT_ONCE + 1).beginning())
    parts = [data["requests" if name == "hello" else "rows"] for name, data in events if name in ("hello", "requests")]
    assert [len(part) for part in parts] == [ROWS_AT_ONCE, ROWS_AT_ONCE, 1]
    numbers = [row["n"] for part in parts for row in part]
    assert numbers == sorted(numbers, reverse=True)
