"""A gateway's feed as `baton top` reads it, over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from services.config.option import Refusal
from services.launcher.authority import Authority
from services.tls.files import CertificateFiles
from services.top.config import GatewayChoice
from services.top.feed import GatewayClient, GatewayError, Lost, NotTold, _events
from services.top.listing import as_text, as_values, take_snapshot
from services.top.summary import summary
from services.top.told import Hello, Rows, Tick
from services.top.view import MAX_REQUESTS, View
from tests.gateway.keys.key_files import KeySet, bearer, write_keys
from tests.gateway.running_api import Api, running_api
from tests.top.fleets import DECODE, PREFILL, choice, set_workers


@pytest.fixture
def key_set(tmp_path: Path) -> KeySet:
    return write_keys(tmp_path / "keys.json")


async def test_a_feed_begins_with_all_that_is_known_and_goes_on_with_what_changes():
    async with running_api() as api, GatewayClient(choice(api)) as client:
        set_workers(api)
        await api.chat()
        view, seen = View(), []
        async with asyncio.timeout(30), aclosing(client.feed()) as feed:
            async for told, _ in feed:
                view.take(told)
                seen.append(type(told))
                if seen.count(Tick) == 1 and len(view.requests()) == 1:
                    await api.chat()
                if len(view.requests()) == 2 and view.requests()[0].state == "done":
                    break
        assert seen[0] is Hello
        assert Rows in seen
        newest, oldest = view.requests()
        assert newest.n > oldest.n
        assert (oldest.endpoint, oldest.status, oldest.model) == ("chat.completions", 200, "m")
        prefill, decode, gone = view.workers()
        assert (prefill.address, prefill.role, prefill.running, prefill.kv_used) == (PREFILL, "prefill", 3, 0.25)
        assert (decode.address, decode.quarantined, decode.kv_used) == (DECODE, 2, 0.75)
        assert (gone.state, gone.why, gone.restarted) == ("gone", "the connection broke", 1)


async def test_a_snapshot_has_the_rows_beyond_those_of_the_hello():
    """A hello has at most 500."""
    async with running_api() as api, GatewayClient(choice(api)) as client:
        for _ in range(26):
            await asyncio.gather(*(api.chat() for _ in range(20)))
        snapshot = await take_snapshot(client)
        assert len(snapshot.view.requests()) == 520
        values = as_values(snapshot, ("requests", "workers"), 510)
        assert len(values["requests"]) == 510
        numbers = [row["n"] for row in values["requests"]]
        assert numbers == sorted(numbers, reverse=True)
        assert values["workers"][0]["incarnation"]  # fields that no table shows are there
        assert "links" not in values


async def test_a_snapshot_has_the_tokens_a_second_of_workers_where_they_are_wanted():
    """A gateway makes ticks only while somebody listens, and the first one has nothing to be compared with."""
    async with running_api() as api, GatewayClient(choice(api)) as client:
        set_workers(api)
        computing = asyncio.create_task(_compute(api))
        snapshot = await take_snapshot(client, with_rates=True)
        computing.cancel()
        prefill, decode, _ = snapshot.view.workers()
        assert prefill.tokens_per_s == 0
        assert decode.tokens_per_s is not None
        assert decode.tokens_per_s > 0
        table = as_text(snapshot, ("workers",), 0, None).splitlines()
        place = table[0].split().index("tok/s")
        assert float(table[2].split()[place].replace(",", "")) == pytest.approx(decode.tokens_per_s, rel=0.1)
        assert (await take_snapshot(client)).view.workers()[1].tokens_per_s is None  # it does not wait


async def _compute(api: Api) -> None:
    """Has the decode worker compute tokens."""
    while True:
        worker = api.fleet.workers[1]
        api.fleet.workers[1] = replace(worker, computed_tokens=(worker.computed_tokens or 0) + 10)
        await asyncio.sleep(0.02)


def test_a_view_keeps_the_newest_requests_alone():
    view = View()
    rows = [{"n": number, "id": "same", "at": float(number)} for number in range(MAX_REQUESTS + 7)]
    view.take(Rows.model_validate({"rows": rows[::-1]}))
    assert len(view.requests()) == MAX_REQUESTS
    assert view.requests()[-1].n == 7
    view.take(Hello())
    assert view.requests() == []


async def test_where_no_feed_is_it_says_what_is_there_instead(key_set: KeySet):
    async with running_api(keys=key_set.keys()) as api, GatewayClient(choice(api)) as client:
        with pytest.raises(NotTold, match="it asks for a key: --api-key or BATON_API_KEY"):
            await anext(client.feed())
    async with running_api() as api, GatewayClient(GatewayChoice(url=api.base_url)) as client:
        with pytest.raises(NotTold, match="has no feed"):
            await anext(client.feed())
    async with GatewayClient(GatewayChoice(url=api.base_url)) as client:  # it has ended
        with pytest.raises(Lost, match="cannot be reached"):
            await anext(client.feed())


async def test_a_tenant_is_told_of_its_own_requests_alone(key_set: KeySet):
    async with running_api(keys=key_set.keys()) as api:
        set_workers(api)
        for key in (key_set.acme, key_set.other):
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            await api.http.post("/v1/chat/completions", json=body, headers=bearer(key))
        async with GatewayClient(GatewayChoice(url=api.base_url, api_keys=(key_set.acme,))) as client:
            view = (await take_snapshot(client)).view
            assert len(view.requests()) == 1
            assert view.workers() == ()
            assert summary(view) == "this key sees its own requests alone"
            own = view.requests()[0]
            assert (await client.record(own.id))["request_id"] == own.id
        async with GatewayClient(choice(api, api_keys=(key_set.operator,))) as client:
            view = (await take_snapshot(client)).view
            assert len(view.requests()) == 2
            assert len(view.workers()) == 3
            other = next(request for request in view.requests() if request.id != own.id)
        async with GatewayClient(GatewayChoice(url=api.base_url, api_keys=(key_set.acme,))) as client:
            with pytest.raises(NotTold, match="knows no recent request"):
                await client.record(other.id)


async def test_a_feed_that_the_gateway_ends_says_why(key_set: KeySet):
    """As where it drains: the page asks another gateway."""
    async with (
        asyncio.timeout(30),
        running_api(keys=key_set.keys()) as api,
        GatewayClient(GatewayChoice(url=api.base_url, api_keys=(key_set.operator,))) as client,
        aclosing(client.feed()) as feed,
    ):
        await anext(feed)
        api.feed.drain(30.0)
        with pytest.raises(Lost, match="ended its feed: the gateway ends"):
            async for _ in feed:
                pass


async def test_one_of_several_requests_with_an_id_is_named_by_its_number():
    async with running_api() as api, GatewayClient(choice(api)) as client:
        for number_of_tokens in (1, 2):
            await api.http.post(
                "/v1/completions",
                json={"model": "m", "prompt": "a" * number_of_tokens},
                headers={"x-request-id": "same"},
            )
        newest, oldest = (await take_snapshot(client)).view.requests()
        assert newest.id == oldest.id == "same"
        first, last = await client.record("same", oldest.n), await client.record("same")
        assert (first["prompt_tokens"], last["prompt_tokens"]) == (2, 3)  # and the first token of all


def test_a_key_is_not_sent_where_others_could_read_it():
    with pytest.raises(Refusal, match="a key is not sent as plain text"):
        GatewayClient(GatewayChoice(url="http://gateway.example:9001", api_keys=("secret",)))
    with pytest.raises(Refusal, match=r"--ca .*: No such file"):
        GatewayClient(GatewayChoice(url="https://gateway.example:9001", ca=Path("/nowhere")))


async def test_a_gateway_with_tls_is_believed_by_the_authority_that_is_named(tmp_path: Path, key_set: KeySet):
    tls = CertificateFiles(Authority().issue(["127.0.0.1"], tmp_path / "tls"))
    async with running_api(keys=key_set.keys(), tls=tls) as api:
        named = GatewayChoice(url=api.base_url, api_keys=(key_set.operator,), ca=tmp_path / "tls" / "ca.crt")
        async with GatewayClient(named) as client:
            assert isinstance((await anext(client.feed()))[0], Hello)
        async with GatewayClient(GatewayChoice(url=api.base_url, api_keys=(key_set.operator,))) as client:
            with pytest.raises(Lost, match="CERTIFICATE_VERIFY_FAILED"):
                await anext(client.feed())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"event: tick\ndata: {\n\n", "does not answer as a gateway"),
        (b'event: tick\ndata: {"now": "noon"}\n\n', "does not answer as a gateway"),
        (b"event: new\ndata: {}\n\n: a comment\n\n", "ended its feed"),
    ],
)
async def test_what_answers_otherwise_than_a_gateway_is_said_in_a_line(answer: bytes, said: str):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with GatewayClient(GatewayChoice(url=f"http://127.0.0.1:{port}")) as client:
            with pytest.raises(GatewayError, match=said) as raised:
                async for _ in client.feed():
                    pass
            assert "\n" not in str(raised.value)


async def test_an_event_may_come_in_pieces_of_any_size():
    async def pieces(text: bytes, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(text), size):
            yield text[at : at + size]

    text = b"event: a\r\ndata: 1\r\n\r\nevent:b\ndata: 2\ndata: 3\n\n"
    for size in range(1, len(text) + 1):
        assert [each async for each in _events(pieces(text, size))] == [("a", "1"), ("b", "2\n3")]
