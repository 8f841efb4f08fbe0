"""Kept responses that were damaged in Redis: there is no such response, whatever a client asks for."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import httpx2
import orjson
import pytest
import pytest_asyncio

from services.gateway.openai.responses.kept_response import UNENDED, UNENDED_END, KeptResponse
from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.gateway.openai.responses.test_official_client import say
from tests.gateway.running_api import Api, running_api
from tests.redis_server import RedisServer, running_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest_asyncio.fixture
async def api(server: RedisServer) -> AsyncIterator[Api]:
    server.admin.flushall()
    client = connect(server.url, timeout_s=60)
    async with running_api(response_store=RedisResponseStore(client, CircuitBreaker(time.monotonic), 600)) as api:
        yield api
    await client.aclose()


def line(number: int, change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Changes one of the packed lines: response, input, pieces."""

    def damaged(packed: bytes) -> bytes:
        lines = packed.split(b"\n")
        lines[number] = change(lines[number])
        return b"\n".join(lines)

    return damaged


def field(name: str, value: object) -> Callable[[bytes], bytes]:
    return line(0, lambda text: orjson.dumps({**orjson.loads(text), name: value}))


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda packed: packed[: int(share * len(packed))]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda packed: b"",
    "text": lambda packed: b"garbage",
    "bytes": lambda packed: bytes(range(256)),
    "zeros": lambda packed: bytes(len(packed)),
    "JSON of another kind": lambda packed: b"null\n[]",
    "an empty object": lambda packed: b"{}\n[]",
    "the response alone": lambda packed: packed.split(b"\n")[0],
    "cut to a tenth": cut(0.1),
    "cut to a half": cut(0.5),
    "cut by a byte": lambda packed: packed[:-1],
    "no UTF-8": line(0, lambda text: text.replace(b"Hello", b"H\xffllo")),
    "a line break": line(0, lambda text: text.replace(b"Hello", b"He\nllo")),
    "no status": field("status", None),
    "another status": field("status", "finished"),
    "another text": lambda packed: packed.replace(b"Hello, world", b"Hello, word"),
    "a renamed field": lambda packed: packed.replace(b'"content"', b'"kontent"'),
    "usage of another type": field("usage", {"total_tokens": "x"}),
    "no tools": field("tools", None),
    "another id": field("id", "resp_0"),
    "an id that is none": field("id", 7),
    "output of another type": field("output", "Hello"),
    "items of another type": field("output", [1]),
    "another object": field("object", "list"),
    "no background": field("background", None),
    "a running one": field("status", "in_progress"),
    "another input": line(1, lambda text: b'{"id": 1}'),
    "an input of numbers": line(1, lambda text: b"[1, 2]"),
    "items without ids": line(1, lambda text: b'[{"type": "message"}]'),
}
OF_BACKGROUND: dict[str, Callable[[bytes], bytes]] = {
    "no pieces": lambda packed: packed.rpartition(b"\n")[0],
    "pieces of another type": line(2, lambda text: b"7"),
    "more pieces than items": line(2, lambda text: b"[[[5],[]],[[1],[]]]"),
    "half of unended": line(2, lambda text: b"unend"),
    "unended though it ended": line(2, lambda text: b"unended"),
}


SMALL = {
    "id": "resp_1",
    "object": "response",
    "output": [{"id": "msg_1", "type": "message", "content": "Hello, world"}],
}
LAST: dict[str, object] = {"metadata": {}, "prompt_cache_key": None}


async def answers(api: Api, response_id: str) -> dict[str, httpx2.Response]:
    """What a client gets, whatever it asks for."""
    path = f"/v1/responses/{response_id}"
    turn = {"input": "Go on", "previous_response_id": response_id}
    return {
        "read": await api.http.get(path),
        "streamed": await api.http.get(f"{path}?stream=true"),
        "input": await api.http.get(f"{path}/input_items"),
        "cancelled": await api.http.post(f"{path}/cancel"),
        "continued": await api.http.post("/v1/responses", json=turn),
        "deleted": await api.http.delete(path),
    }


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_was_damaged_is_not_there(api: Api, server: RedisServer, background: bool):
    say(api, "Hello, world")
    answer = await api.http.post("/v1/responses", json={"input": "Hello", "background": background})
    response_id = answer.json()["id"]
    while (await api.http.get(f"/v1/responses/{response_id}")).json()["status"] != "completed":
        await asyncio.sleep(0.01)
    key = f"baton:response:default:{response_id}"
    packed = server.admin.get(key)
    assert isinstance(packed, bytes)
    found = {}
    for name, damage in (DAMAGES | (OF_BACKGROUND if background else {})).items():
        server.admin.set(key, damage(packed))
        found[name] = {asked: each.status_code for asked, each in (await answers(api, response_id)).items()}
    for name in ("a list", "a hash"):
        server.admin.delete(key)
        server.admin.lpush(key, "x") if name == "a list" else server.admin.hset(key, "x", "y")
        found[name] = {asked: each.status_code for asked, each in (await answers(api, response_id)).items()}
    wrong = {name: codes for name, codes in found.items() if set(codes.values()) != {404}}
    assert not wrong
    server.admin.set(key, packed)
    assert (await api.http.get(f"/v1/responses/{response_id}")).json()["id"] == response_id


@pytest.mark.parametrize("pieces", [b"", b"[[[5,7],[]]]", UNENDED])
@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
def test_a_bit_that_flips_anywhere_is_seen(pieces: bytes, flip: int):
    ended = pieces != UNENDED
    response = orjson.dumps(SMALL | {"status": "completed" if ended else "queued", "background": bool(pieces)} | LAST)
    kept = KeptResponse(response, b'[{"id":"msg_0","type":"message","content":"Hi"}]', pieces)
    packed = kept.pack("resp_1")
    assert KeptResponse.unpack(packed, "resp_1") == kept
    assert packed.endswith(UNENDED_END) != ended
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= flip
        with pytest.raises(ValueError):
            KeptResponse.unpack(bytes(damaged), "resp_1")
    for length in range(len(packed)):
        with pytest.raises(ValueError):
            KeptResponse.unpack(packed[:length], "resp_1")
    with pytest.raises(ValueError, match="digest"):
        KeptResponse.unpack(packed, "resp_2")


@pytest.mark.parametrize("pieces", [b"", b"[[[5,7],[]]]"])
def test_what_an_older_version_kept_is_read(pieces: bytes):
    response = orjson.dumps(SMALL | {"status": "completed", "background": bool(pieces)} | LAST)
    packed = b"\n".join([response, b"[]", *([pieces] if pieces else [])])
    assert KeptResponse.unpack(packed, "resp_1") == KeptResponse(response, b"[]", pieces)


async def test_pieces_that_do_not_make_up_their_text_are_no_stream(api: Api, server: RedisServer):
    say(api, "Hello, world")
    response_id = (await api.http.post("/v1/responses", json={"input": "Hello", "background": True})).json()["id"]
    while (await api.http.get(f"/v1/responses/{response_id}")).json()["status"] != "completed":
        await asyncio.sleep(0.01)
    key = f"baton:response:default:{response_id}"
    packed = server.admin.get(key)
    assert isinstance(packed, bytes)
    kept = KeptResponse.unpack(packed, response_id)
    for pieces in (b"[[[3],[]]]", b"[[[300],[]]]", b"[[[-2,14],[]]]", b"[[[],[]]]"):
        server.admin.set(key, replace(kept, pieces=pieces).pack(response_id))
        assert (await api.http.get(f"/v1/responses/{response_id}?stream=true")).status_code == 404
