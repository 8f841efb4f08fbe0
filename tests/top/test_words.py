"""Figures, tables, the summary and the timeline of a request, as text."""

import time

import pytest

from services.top import columns, figures
from services.top.screen.lists import _colour
from services.top.summary import summary, unhealthy
from services.top.tables import as_table
from services.top.timeline import as_text, phases_of
from services.top.told import Link, Request, Tick, Worker
from services.top.view import View


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (figures.age(None), "-"),
        (figures.age(-1), "0s"),
        (figures.age(59.9), "59s"),
        (figures.age(60), "1m0s"),
        (figures.age(3600 * 2 + 61), "2h1m"),
        (figures.age(86400 * 4 + 3600 * 3), "4d3h"),
        (figures.size(0), "0 B"),
        (figures.size(999), "999 B"),
        (figures.size(1_234_567), "1.2 MB"),
        (figures.size(9e18), "9,000.0 PB"),
        (figures.milliseconds(9.96), "10.0"),
        (figures.milliseconds(1234.4), "1,234"),
        (figures.share(0.754), "75%"),
        (figures.rate(3.25), "3.2"),
        (figures.count(None), "-"),
        (figures.printable("a\x1b[2Jb\n"), "a\ufffd[2Jb\ufffd"),
    ],
)
def test_figures_are_short(made: str, text: str):
    assert made == text


WORKERS = [
    Worker(address="10.0.0.1:9100", role="prefill", since=100.0, running=1, waiting=20, kv=None),
    Worker(address="10.0.0.2:9200", role="decode", state="gone", why="it ended", restarted=2),
]


def test_a_table_has_all_columns_where_nobody_says_how_wide_it_may_be():
    title, prefill, decode = as_table(columns.WORKERS, WORKERS, 160.0).splitlines()
    assert title.split() == [column.title for column in columns.WORKERS]
    assert prefill.split() == ["10.0.0.1:9100", "prefill", "ok", "1m0s", "1", "20", "-", "-", "0", "0", "-", "-", "-"]
    assert decode.endswith("it ended")
    assert title.index("wait") + 4 == prefill.index("20") + 2  # numbers end below each other


@pytest.mark.parametrize(
    ("state", "colour"),
    [
        ("ok", "green"),
        ("gone", "bold red"),
        ("503", "red"),
        ("404 x", "red"),
        ("200 stop", ""),
        ("INTERNAL", "red"),
        ("OK", ""),
    ],
)
def test_what_failed_is_red(state: str, colour: str):
    assert _colour(state) == colour


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_on_a_terminal_says_what_it_has_no_room_for(width: int):
    *lines, said = as_table(columns.WORKERS, WORKERS, 160.0, width).splitlines()
    assert max(map(len, lines)) <= width
    assert said.startswith("(no room for ")
    assert len(lines[0].split()) + said.count(",") + 1 == len(columns.WORKERS)


def test_a_text_of_others_does_not_move_the_cursor():
    assert "\x1b" not in as_table(columns.LINKS, [Link(prefill="a", decode="b", why="\x1b[31m")], 0.0)


def test_a_request_says_where_it_is_and_how_it_ended():
    in_flight = Request(n=1, id="a", at=0.0, state="in flight", phase="prefill")
    done = Request(n=2, id="b", at=0.0, state="done", status=200, finish="stop")
    assert columns.state_of(in_flight) == "prefill"
    assert columns.state_of(done) == "200 stop"


def test_unknown_values_are_sorted_last():
    (column,) = (each for each in columns.WORKERS if each.title == "run")
    assert [worker.running for worker in sorted(WORKERS, key=lambda worker: column.key(worker, 0.0))] == [1, None]


def test_the_summary_has_the_gateway_and_what_is_wrong_with_the_fleet():
    view = View()
    assert summary(view) == "waiting for the gateway"
    ill = [{"what": "worker", "name": f"w{number}", "why": "it ended", "since": 40.0} for number in range(6)]
    gateway = {"id": "aa", "version": "0.1.0", "in_flight": 3, "waiting": 1, "uptime_s": 61}
    workers = [worker.model_dump() for worker in WORKERS]
    values = {"now": 100.0, "gateway": gateway, "workers": workers, "unhealthy": ill, "redis": {"state": "down"}}
    view.take(Tick.model_validate(values))
    assert summary(view) == "gateway aa 0.1.0  up 1m1s  3 in flight, 1 waiting  1 prefill  0 decode  Redis down"
    assert list(unhealthy(view)) == [*(f"worker w{number} for 1m0s: it ended" for number in range(4)), "and 2 more"]


RECORD = {
    "request_id": "abc",
    "model": "m",
    "arrived_at": time.time(),
    "endpoint": "chat.completions",
    "in_flight": False,
    "status": 200,
    "key_id": "k1",
    "prompt_tokens": 512,
    "cached_tokens": 480,
    "generated_tokens": 64,
    "finish_reason": "stop",
    "ttft_ms": 123.4,
    "duration_ms": 1234.5,
    "phases_ms": {"read": 1.2, "tokenize": 3.4, "prefill": 118.8, "handoff": 40.0, "generate": 1111.1},
    "attempts": [
        {
            "number": 1,
            "why": "sooner",
            "expected_s": {"pair": 0.12, "alone": None},
            "at_ms": {"sent": 6.0},
            "failure": "the process ended",
            "workers": [
                {
                    "role": "decode",
                    "worker": "d:1",
                    "cached_tokens": {"predicted": 16, "found": 0},
                    "at_ms": {"received": 6.5, "announced": None, "ready": 140.0},
                    "wire_ms": 1.0,
                    "transport": "nixl",
                    "why_transport": "same host",
                    "kv_bytes": 3_200_000,
                    "reading_ms": 12.0,
                }
            ],
            "ends": [{"choice": 0, "reason": "worker_lost", "tokens": 3, "at_ms": 200.0}],
            "candidates": [
                {"worker": "d:1", "role": "decode", "cost": 32, "verdict": "chosen", "cached_tokens": 0},
                {"worker": "d:2", "role": "decode", "cost": 612, "verdict": "costs more", "cached_tokens": 0},
            ],
        }
    ],
}


def test_the_phases_of_a_request_follow_each_other_and_add_up_to_its_time():
    """`handoff` is a part of `generate`."""
    phases = phases_of(RECORD)
    assert [name for name, _, _ in phases] == ["read", "tokenize", "prefill", "generate", "handoff"]
    at = 0.0
    for _, begin, length in phases[:-1]:
        assert begin == pytest.approx(at)
        at += length
    assert at == pytest.approx(RECORD["duration_ms"])
    assert phases[-1][1] == phases[-2][1]


def test_a_request_without_a_token_has_the_rest_of_its_time_in_one_line():
    record = {"phases_ms": {"read": 1.0, "tokenize": 2.0}, "duration_ms": 503.0, "status": 503}
    assert phases_of(record)[-1] == ("without a token", 3.0, 500.0)
    assert "together" in as_text(record)


def test_a_timeline_has_attempts_moves_and_every_candidate_with_its_cost_and_verdict():
    text = as_text(RECORD, 100)
    for words in (
        "request abc: chat.completions m 200 stop",
        "with key k1",
        "512 tokens of prompt, 480 of them cached; 64 generated",
        "1,234.5  of 1,234.5",
        "attempt 1, sent after 6.0 ms: sooner; expected pair 0.120 s",
        "decode d:1: 0 tokens cached, 16 predicted",
        "at ms: received 6.5, ready 140.0; 1.0 ms on the wire",
        "KV over nixl (same host): 3.2 MB in 12 ms",
        "failed: the process ended",
        "choice 0: worker_lost after 200 ms, with 3 tokens",
    ):
        assert words in text
    candidates = [line.split() for line in text.splitlines() if "d:2" in line]
    assert candidates == [["d:2", "decode", "612", "costs", "more", "0", "-", "-"]]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_bars_of_a_timeline_fit_the_terminal(width: int):
    for line in as_text(RECORD, width).splitlines():
        if "━" in line:
            assert len(line.removesuffix("  (in generate)")) <= width
