"""The feed over the API side: what listeners are told, and what a listener cannot do to the gateway."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from services.gateway.api.generation import Delta
from services.gateway.api.records.request_rows import KEPT_ROWS
from services.gateway.console import feed as feeds
from services.gateway.console import pages
from services.gateway.overview import AvoidedPair, PrefixHit, WorkerState
from services.protocol.outcomes import FinishReason
from tests.gateway.console.feed_reader import feed
from tests.gateway.console.scripted_fleet import a_worker
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token


async def test_a_listener_is_told_of_a_request_when_it_begins_and_as_it_goes_on():
    async with running_api() as api, feed(api.admin) as listener:
        assert (await listener.any())[0] == "hello"
        gate = asyncio.Event()
        api.generator.script = Script(delta_per_token([*b"Hello"], cached_tokens=8), gate=gate, before_gate=1)
        asking = asyncio.create_task(api.chat(stream=True, max_tokens=9))
        row = await listener.row(lambda row: row["ttft_ms"] is not None)
        begun = (row["state"], row["ms"], row["model"], row["endpoint"])
        assert begun == ("in flight", None, MODEL, "chat.completions")
        tick = await listener.next("tick", lambda tick: tick["gateway"]["in_flight"] == 1)
        assert tick["workers"][0]["kv"] == {"device": {"used": 16, "total": 64, "quarantined": 0}}
        whole = (await api.admin.get(f"/console/requests/{row['id']}")).json()
        assert (whole["generated_tokens"], whole["in_flight"], whole["text"]) == (1, True, None)
        gate.set()
        await asking
        ended = await listener.row(lambda row: row["state"] == "done")
        record = (await api.admin.get(f"/debug/requests/{row['id']}")).json()
        assert [ended[name] for name in ("n", "id", "generated", "prompt", "cached", "finish", "ttft_ms", "ms")] == [
            row["n"],
            record["request_id"],
            record["generated_tokens"],
            record["prompt_tokens"],
            record["cached_tokens"],
            record["finish_reason"],
            record["ttft_ms"],
            record["duration_ms"],
        ]
        assert ended["generated"] == 5


async def test_tokens_of_a_choice_that_ended_still_count():
    async with running_api() as api:
        gate = asyncio.Event()
        first = Delta([*b"Hel"], None, FinishReason.LENGTH, 0)
        second, last = (Delta([*b"H"], None, finish, 0, 1) for finish in (FinishReason.NONE, FinishReason.LENGTH))
        api.generator.script = Script([first, second, last], for_all=False, gate=gate, before_gate=2)
        asking = asyncio.create_task(api.chat(stream=True, n=2, max_tokens=9))
        async with asyncio.timeout(30):
            while (found := await only_record(api)) is None or found["generated_tokens"] != 4:
                await asyncio.sleep(0.01)
        assert found["in_flight"]
        gate.set()
        await asking
        ended = await only_record(api)
        assert (ended["generated_tokens"], ended["in_flight"]) == (5, False)


async def only_record(api: Api) -> Any:
    """The record of the one request that there was, as a console gets it; None: there is none so far."""
    for row in (await api.admin.get("/debug/requests")).json()["requests"]:
        return (await api.admin.get(f"/console/requests/{row['request_id']}")).json()
    return None


async def test_who_comes_later_is_told_of_what_was():
    async with running_api() as api:
        for _ in range(3):
            await api.chat()
        await api.complete(n=9)
        assert (await api.http.post("/v1/completions", json={"model": "another", "prompt": "a"})).status_code == 404
        async with feed(api.admin) as listener:
            _, hello = await listener.any()
        states = [(row["n"], row["state"], row["status"], row["error"]) for row in hello["requests"]]
        assert states[0] == (5, "failed", 404, "model_not_found")
        assert states[1:] == [(number, "done", 200, None) for number in (4, 3, 2, 1)]
        assert hello["requests"][0]["model"] is None
        (up,) = hello["events"]
        assert (up["kind"], up["name"]) == ("worker_up", api.fleet.workers[0].address)


async def test_a_long_list_comes_in_parts_before_the_first_tick():
    async with running_api() as api:
        await asyncio.gather(*(api.complete(n=1) for _ in range(3)))
        rows = api.feed._sources.records.rows
        rows.settle()
        (one, *_) = rows.ended_between(0, 3)
        for number in range(1100):  # as if so many had ended
            rows._ended.append((None, one[1].replace(b'"n":3', b'"n":%d' % (number + 4), 1), number + 4))
            rows.num_ended += 1
        async with feed(api.admin) as listener:
            await listener.next("tick")
        names = [name for name, _ in listener.seen]
        assert names == ["hello", "requests", "requests", "prefixes", "tick"]
        assert [len(listener.seen[0][1]["requests"])] + [len(data["rows"]) for _, data in listener.seen[1:3]] == [
            500,
            500,
            103,
        ]
        assert sorted(listener.rows) == list(range(1, 1104))
        assert KEPT_ROWS >= 5000


async def test_a_sample_has_what_the_metrics_grew_by_and_the_history_keeps_it():
    async with running_api() as api:
        before = await metrics_of(api)
        async with feed(api.admin) as listener:
            await listener.next("sample")  # of what was before
            for _ in range(4):
                await api.chat(max_tokens=3)
            await api.chat(model="another")
            found: list[Any] = []
            while sum(sample["requests"]["refused"] for sample in found) < 1:
                found.append(await listener.next("sample"))
        now = await metrics_of(api)
        grown = {name: now[name] - before.get(name, 0) for name in now}
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
            assert sum(sample[name] for sample in found) == grown[f"baton_{name}_total"]
        for name in ("ttft", "e2e", "itl"):
            assert sum(sum(sample[name]) for sample in found) == grown[f"baton_{name}_seconds_count"]
            total = sum(sample["sums"][name] for sample in found)
            assert total == pytest.approx(grown[f"baton_{name}_seconds_sum"], abs=1e-5)
        assert sum(sample["requests"]["ok"] for sample in found) == 4
        async with feed(api.admin) as later:
            _, hello = await later.any()
        assert hello["history"]["samples"][-len(found) - 5 :][-1]["at"] >= found[-1]["at"]
        bounds = hello["history"]["bounds"]
        assert all(len(found[0][name]) == len(bounds[name]) + 1 for name in ("ttft", "itl", "e2e", "queue"))


async def metrics_of(api: Api) -> dict[str, float]:
    lines = (await api.admin.get("/metrics")).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_nothing_is_computed_while_nobody_listens_but_a_sample(monkeypatch: pytest.MonkeyPatch):
    async with running_api() as api:
        async with asyncio.timeout(30):
            while not api.fleet.asked:
                await asyncio.sleep(0.01)
        assert api.feed._position.turn == 0, "that was a sample's"
        monkeypatch.setattr(feeds, "STEP_S", 3600)
        asked = api.fleet.asked
        await asyncio.sleep(5 * feeds.TURN_S)
        assert api.fleet.asked == asked
        async with feed(api.admin) as listener:
            await listener.next("tick")
            assert api.fleet.watched
        while api.fleet.watched:
            await asyncio.sleep(0.01)
        asked = api.fleet.asked
        await asyncio.sleep(5 * feeds.TURN_S)
        assert api.fleet.asked == asked


async def test_all_listeners_get_the_same_turn_which_is_made_once():
    async with running_api() as api, feed(api.admin) as one, feed(api.admin) as other:
        newest = (await other.next("tick"))["now"]
        await one.next("tick", lambda tick: tick["now"] >= newest)
        asked = api.fleet.asked
        ticks = [(await one.next("tick"), await other.next("tick")) for _ in range(10)]
        assert len({tick["now"] for pair in ticks for tick in pair}) <= 11
        assert api.fleet.asked - asked <= 12, "once for both"


async def test_the_fleet_is_shown_with_what_is_not_as_it_should_be():
    async with running_api() as api, feed(api.admin) as listener:
        await listener.next("tick")
        gone = a_worker("b:2", WorkerState.GONE, why="killed", since=5.0, blocks=None, computed_tokens=None)
        api.fleet.workers = [a_worker("a:1", computed_tokens=900, restarted=1), gone]
        api.fleet.avoided = [AvoidedPair("p:1", "a:1", "a handoff failed", 7.0)]
        api.fleet.hits = [PrefixHit("ab", 64, 3, 192, ["a:1"])]
        tick = await listener.next("tick", lambda tick: tick["unhealthy"])
        assert [(each["what"], each["name"], each["since"]) for each in tick["unhealthy"]] == [
            ("worker", "b:2", 5.0),
            ("link", "p:1 → a:1", 7.0),
        ]
        assert [(each["address"], each["state"], each["why"], each["restarted"]) for each in tick["workers"]] == [
            ("a:1", "ok", None, 1),
            ("b:2", "gone", "killed", 0),
        ]
        assert tick["links"] == [
            {
                "prefill": "p:1",
                "decode": "a:1",
                "transport": None,
                "why": None,
                "handoffs": 0,
                "failed": 0,
                "bytes": 0,
                "reading_s": 0.0,
                "avoided": True,
            }
        ]
        told = [data for name, data in listener.seen if name == "event"]
        assert [(each["kind"], each["name"], each["at"]) for each in told] == [
            ("worker_up", "a:1", 1000.0),
            ("worker_gone", "b:2", 5.0),
            ("link_avoided", "p:1 → a:1", 7.0),
        ]
        hits = await listener.next("prefixes", lambda data: data["prefixes"])
        assert hits["prefixes"] == [{"name": "ab", "tokens": 64, "uses": 3, "saved_tokens": 192, "workers": ["a:1"]}]


async def test_there_is_room_for_so_many_and_no_more():
    async with running_api() as api, AsyncExitStack() as stack:
        limits = httpx2.Limits(max_connections=None)
        client = httpx2.AsyncClient(base_url=api.admin.base_url, limits=limits, verify=False)
        client = await stack.enter_async_context(client)
        listeners = [await stack.enter_async_context(feed(client)) for _ in range(feeds.MAX_LISTENERS)]
        await listeners[-1].next("tick")
        refused = await client.get("/console/feed")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["message"].startswith("32 consoles listen already.")
        await listeners[0].response.aclose()
        async with asyncio.timeout(30):
            while (await status_of(client)) == 503:
                await asyncio.sleep(0.02)


async def status_of(client: httpx2.AsyncClient) -> int:
    async with client.stream("GET", "/console/feed") as response:
        return response.status_code


class Deaf:
    """A client that has asked for the feed and does not read."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(b"GET /console/feed HTTP/1.1\r\nHost: x\r\n\r\n")

    def __enter__(self) -> "Deaf":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def turns(api: Api, number: int) -> None:
    """So many turns at once, each with a tick of some 30 kB: more than the system keeps for a client."""
    for _ in range(number):
        api.feed.take_turn()


def large_fleet(api: Api) -> None:
    api.fleet.workers = [a_worker(f"w:{number}", why="x" * 200) for number in range(100)]


async def test_a_listener_that_does_not_read_skips_turns_and_gets_what_it_missed():
    async with running_api() as api:
        large_fleet(api)
        with Deaf(admin_port(api)) as deaf:
            listener = await until_listening(api)
            async with asyncio.timeout(60):
                while not listener._behind.is_set():
                    api.feed.take_turn()
                    await asyncio.sleep(0)
            held = listener.position
            for number in range(1, 4):
                await api.chat(max_tokens=number)
                turns(api, 40)
                await asyncio.sleep(0)
            assert listener.position.turn <= held.turn + 1, "nothing is written to who does not read"
            assert (taken := api.feed._position.turn) > held.turn + 100
            text = await asyncio.to_thread(read_until, deaf.socket, lambda text: text.count('"state":"done"') >= 3)
        numbers = [row["n"] for name, data in events_of(text) if name in ("hello", "requests") for row in rows_of(data)]
        assert sorted({*numbers}) == [1, 2, 3]
        assert text.count("event: hello") == 1
        assert text.count("event: tick") < taken - 80, "it skipped most"


async def test_one_that_missed_rows_which_are_gone_begins_anew():
    async with running_api() as api:
        large_fleet(api)
        with Deaf(admin_port(api)) as deaf:
            listener = await until_listening(api)
            async with asyncio.timeout(60):
                while not listener._behind.is_set():
                    api.feed.take_turn()
                    await asyncio.sleep(0)
            await api.chat()
            rows = api.feed._sources.records.rows
            rows.settle()
            (row,) = rows.ended_between(0, 1)
            for _ in range(KEPT_ROWS + 10):
                rows._ended.append(row)
                rows.num_ended += 1
            api.feed.take_turn()
            text = await asyncio.to_thread(read_until, deaf.socket, lambda text: text.count("event: hello") == 2)
        assert text.count("event: hello") == 2


async def test_one_that_does_not_read_at_all_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(pages, "SLOW_S", 0.3)
    async with running_api() as api:
        large_fleet(api)
        with Deaf(admin_port(api)) as deaf:
            await until_listening(api)
            async with asyncio.timeout(60):
                while api.feed._listeners:
                    api.feed.take_turn()
                    await asyncio.sleep(0.001)
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(read_until, deaf.socket, lambda text: False)
    assert "without completing response" not in caplog.text


async def test_a_stream_that_has_lasted_long_ends_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "FEED_S", 0.2)
    async with running_api() as api, feed(api.admin) as listener:
        *_, last = await listener.rest()
    assert last == ("end", {"why": "begin another stream"})


def admin_port(api: Api) -> int:
    port = api.admin.base_url.port
    assert port is not None
    return port


async def until_listening(api: Api) -> Any:
    async with asyncio.timeout(30):
        while not api.feed._listeners:
            await asyncio.sleep(0.005)
    return next(iter(api.feed._listeners))


def read_until(connection: socket.socket, enough: Any) -> str:
    """What comes until it is enough, without the lengths of HTTP's chunks."""
    connection.settimeout(60)
    text = ""
    while not enough(text):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the connection ended")
        text += part.decode()
    return text


def events_of(text: str) -> list[tuple[str, Any]]:
    """The whole events of a stream that was cut anywhere."""
    found = []
    for block in text.split("event: ")[1:]:
        name, _, rest = block.partition("\ndata: ")
        data, complete, _ = rest.partition("\n\n")
        if complete:
            found.append((name, json.loads(data)))
    return found


def rows_of(data: Any) -> list[Any]:
    rows: list[Any] = data.get("requests") or data.get("rows") or []
    return rows


async def test_a_client_of_http_1_0_is_told_too():
    """As a proxy that knows no chunks, which is nginx by default."""
    async with running_api() as api:
        with socket.create_connection(("127.0.0.1", admin_port(api))) as connection:
            connection.sendall(b"GET /console/feed HTTP/1.0\r\n\r\n")
            text = await asyncio.to_thread(read_until, connection, lambda text: text.count("event: tick") >= 3)
        assert [name for name, _ in events_of(text)].count("hello") == 1


async def test_a_defect_in_a_turn_is_logged_and_costs_a_listener_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feeds, "STEP_S", 0.01)  # so that each turn has prefixes
    async with running_api() as api, feed(api.admin) as listener:
        await listener.next("tick")
        await api.chat()
        api.fleet.broken = RuntimeError("a defect")
        while api.fleet.broken is not None:
            await asyncio.sleep(0.01)
        assert (await listener.row(lambda row: row["state"] == "done"))["n"] == 1
        await api.chat()
        assert (await listener.row(lambda row: row["n"] == 2 and row["state"] == "done"))["status"] == 200
        (line,) = (line for line in api.logs if line["event"] == "a part failed; it is tried again")
        assert line["part"] == "the feed"
