"""The soak: its faults, and that a planted wrong token, a planted leak and a lost request turn it red."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from random import Random
from threading import Thread
from time import perf_counter
from typing import Any

import grpc
import orjson
import pytest

from loadtest.http_stream import Address
from loadtest.ledger import Leftovers
from loadtest.processes import Process
from loadtest.soak import background
from loadtest.soak.background import BackgroundTraffic, Known
from loadtest.soak.cases import Case
from loadtest.soak.leaks import leaked
from loadtest.soak.members import Member
from loadtest.soak.memory import Growth
from loadtest.soak.schedule import SPARED, Kind, schedule
from loadtest.soak.traffic import Counts, Doors, Traffic, Wish
from loadtest.soak.verdict import MAX_GROWTH_MIB, Result, complaints, demands, table
from protos import inference_pb2, inference_pb2_grpc

CASE = Case((5, 6, 7), "abc", ("a", "b", "c"))
NOBODY = Address("127.0.0.1", 1)  # a port at which nobody listens
KILLS = (Kind.KILL_PREFILL, Kind.KILL_DECODE, Kind.KILL_GATEWAY, Kind.DRAIN_WORKER, Kind.ROLLING_RESTART)


def test_the_faults_of_a_seed_are_the_same_each_time_and_each_kind_comes_often_enough():
    faults = schedule(3, 20)
    assert faults == schedule(3, 20)
    assert faults != schedule(4, 20)
    kinds = Counter(fault.kind for fault in faults)
    assert min(kinds[kind] for kind in Kind) >= demands(20).faults_of_each_kind == 3
    assert len(faults) >= demands(20).faults == 60
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


@pytest.mark.parametrize("seed", range(20))
def test_one_process_of_each_role_lives_from_the_first_quarter_on(seed: int):
    for fault in schedule(seed, 20):
        if fault.at_s > 300 and fault.kind in KILLS:
            assert not SPARED & set(fault.victims)


@contextmanager
def answering(texts: list[str], *, breaks_off: bool = False) -> Iterator[Address]:
    """A server that answers with these tokens, whole or as a stream; breaks_off: without an end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            choices = [
                {"index": index, "text": "".join(texts), "finish_reason": "length", "logprobs": {"tokens": texts}}
                for index in range(body["n"])
            ]
            if not body["stream"]:
                self.wfile.write(orjson.dumps({"choices": choices})[: 20 if breaks_off else None])
                return
            for choice in choices:
                self.wfile.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
            if not breaks_off:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None: ...

    with serving(Handler) as address:
        yield address


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Address]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Address("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def counted(address: Address, wish: Wish) -> Counts:
    traffic = Traffic({"gateway-0": Doors(address, NOBODY)}, "m", [CASE], 1, lambda gateway, since_s: False)
    asyncio.run(traffic.ask(wish))
    return traffic.counts


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_right_answers_are_finished_and_a_planted_wrong_token_is_red(stream: bool, logprobs: bool):
    wish = Wish(CASE, "gateway-0", 2, stream, logprobs)
    with answering(["a", "b", "c"]) as address:
        right = counted(address, wish)
    with answering(["a", "x", "c"]) as address:
        wrong = counted(address, wish)
    assert (right.finished, right.wrong) == (1, 0)
    assert wrong.wrong == 1
    assert complaints(result(right)) == []
    assert complaints(result(wrong)) == ["1 answers were wrong"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_breaks_off_is_lost_and_red(stream: bool):
    with answering(["a", "b", "c"], breaks_off=True) as address:
        counts = counted(address, Wish(CASE, "gateway-0", 1, stream, False))
    assert (counts.finished, counts.lost.total()) == (0, 1)
    assert "1 requests were lost" in complaints(result(counts))


def test_an_answer_whose_gateway_was_killed_is_asked_for_at_the_other_one():
    with answering(["a"], breaks_off=True) as broken, answering(["a", "b", "c"]) as whole:
        killed = ["gateway-0"]
        gateways = {"gateway-0": Doors(broken, NOBODY), "gateway-1": Doors(whole, NOBODY)}
        traffic = Traffic(gateways, "m", [CASE], 1, lambda gateway, since_s: gateway in killed)
        asyncio.run(traffic.ask(Wish(CASE, "gateway-0", 1, True, False)))
    assert (traffic.counts.finished, traffic.counts.gateway_killed, traffic.counts.lost.total()) == (1, 1, 0)


class Speaking(inference_pb2_grpc.InferenceServicer):
    """Answers with one text, then with OK, the gateway's own words, or words of nobody."""

    def __init__(self, text: str, ends: str = "well") -> None:
        self._text, self._ends = text, ends

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        for choice in range(request.n):
            reason = inference_pb2.FINISH_REASON_LENGTH
            await context.write(inference_pb2.GenerateResponse(text=self._text, choice=choice, finish_reason=reason))
        if self._ends != "well":
            said = (("x-request-id", "1"),) if self._ends == "in words" else ()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker", said)


async def test_a_process_counts_as_killed_until_it_is_gone():
    member = Member(Process("sleeper", ("sleep", "60")))
    before_s = perf_counter()
    await member.start()
    assert member.began_since(before_s)
    assert not member.killed_since(before_s)
    killing = asyncio.create_task(member.kill())
    await asyncio.sleep(0)  # the signal is out
    meanwhile_s = perf_counter()
    assert not killing.done()
    assert member.killed_since(meanwhile_s)
    await killing
    assert member.killed_since(meanwhile_s)
    assert not member.killed_since(perf_counter())


@pytest.mark.parametrize(
    ("speaking", "finished", "wrong", "failed", "lost"),
    [
        (Speaking("abc"), 1, 0, 0, 0),
        (Speaking("abx"), 1, 1, 0, 0),
        (Speaking("ab", "in words"), 0, 0, 1, 0),
        (Speaking("ax", "in words"), 0, 1, 1, 0),
        (Speaking("ab", "cut"), 0, 0, 0, 1),
    ],
)
async def test_grpc_streams_are_checked_likewise(speaking: Speaking, finished: int, wrong: int, failed: int, lost: int):
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(speaking, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    doors = {"gateway-0": Doors(NOBODY, Address("127.0.0.1", port))}
    traffic = Traffic(doors, "m", [CASE], 1, lambda gateway, since_s: False)
    await traffic.ask(Wish(CASE, "gateway-0", 2, True, False, grpc=True))
    await server.stop(0)
    counts = traffic.counts
    assert (counts.finished, counts.wrong, counts.failed.total(), counts.lost.total()) == (
        finished,
        wrong,
        failed,
        lost,
    )


@contextmanager
def responding(ends: Callable[[int], Iterator[Mapping[str, Any]]]) -> Iterator[Address]:
    """A server of background responses. ends: of the first, second and so on, how it is told to have ended at last."""
    told: list[Iterator[Mapping[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["background"]
            told.append(ends(len(told) + 1))
            self._say(200, {"id": "r", "status": "queued", "output": []})

        def do_GET(self) -> None:
            end = next(told[-1])
            self._say(404 if end is FORGOTTEN else 200, end)

        def _say(self, status: int, value: Mapping[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(orjson.dumps(value))

        def log_message(self, format: str, *args: object) -> None: ...

    with serving(Handler) as address:
        yield address


def ended(status: str, text: str) -> dict[str, Any]:
    error = {"message": "no worker"} if status == "failed" else None
    return {"id": "r", "status": status, "output": [{"content": [{"text": text}]}], "error": error}


FORGOTTEN: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("ends", "finished", "wrong", "failed"),
    [
        ([FORGOTTEN, ended("in_progress", ""), ended("incomplete", "abc"), ended("incomplete", "abc")], 1, 0, 0),
        ([ended("incomplete", "abx")] * 2, 0, 1, 0),
        ([ended("failed", "")] * 2, 0, 0, 1),
        ([ended("failed", ""), ended("incomplete", "abc")], 0, 1, 0),
    ],
)
def test_a_background_response_has_one_end_and_a_right_one(
    ends: list[dict[str, Any]], finished: int, wrong: int, failed: int
):
    counts = Counts()
    with responding(lambda number: iter(ends)) as address:
        traffic = BackgroundTraffic({"gateway-0": address}, "m", [], 1, lambda gateway, since_s: False, counts)
        asyncio.run(traffic.ask(Known("hello", 3, "abc"), Random(1)))
    assert (counts.background, counts.finished, counts.wrong, counts.failed.total()) == (1, finished, wrong, failed)


@pytest.mark.parametrize(("later", "forgotten", "lost"), [(FORGOTTEN, 1, 0), (ended("in_progress", ""), 0, 1)])
def test_a_background_response_that_no_gateway_knows_is_forgotten_and_one_without_an_end_is_lost(
    later: dict[str, Any], forgotten: int, lost: int, monkeypatch: pytest.MonkeyPatch
):
    """Redis was killed after it had begun."""
    monkeypatch.setattr(background, "HANGS_S", 1.0)
    counts, kills = Counts(), iter([True])
    first = repeat(later)
    with responding(lambda number: first if number == 1 else repeat(ended("incomplete", "abc"))) as address:

        def killed(name: str, since_s: float) -> bool:
            return name == "redis" and next(kills, False)

        traffic = BackgroundTraffic({"gateway-0": address}, "m", [], 1, killed, counts)
        asyncio.run(traffic.ask(Known("hello", 3, "abc"), Random(1)))
    assert (counts.forgotten, counts.lost.total(), counts.finished) == (forgotten, lost, forgotten)


class Gateways:
    """One gateway that knows of one worker."""

    def __init__(self, **worker: int) -> None:
        self._worker = {"num_blocks": 9, "available_blocks": 9, "running": 0, "waiting": 0} | worker

    async def ledgers(self) -> Mapping[str, Any]:
        return {"gateway-0": {"workers": [self._worker], "rows": []}}


@pytest.mark.parametrize(
    ("planted", "left"), [({"available_blocks": 7}, Leftovers(blocks=2)), ({"running": 1}, Leftovers(sequences=1))]
)
def test_a_planted_leak_is_red(planted: dict[str, int], left: Leftovers):
    assert asyncio.run(leaked(Gateways(), 0.1)) == Leftovers()
    assert asyncio.run(leaked(Gateways(**planted), 0.1)) == left
    (complaint,) = complaints(replace(result(Counts(finished=1)), left=left))
    assert complaint.startswith("leaked: ")


def test_memory_that_grows_and_too_little_work_are_red():
    grown = replace(result(Counts(finished=1)), growths=[Growth("decode-1", 100.0, 101.0 + MAX_GROWTH_MIB)])
    assert [each.partition(" ")[0] for each in complaints(grown)] == ["decode-1"]
    idle = replace(result(Counts()), minutes=20.0)
    reasons = " ".join(complaints(idle))
    assert "0 requests finished, 2000 must" in reasons
    assert "0 faults, at least 60 must be" in reasons
    assert "0 times: kill Redis" in reasons
    assert "| lost " in table(idle)


def result(counts: Counts) -> Result:
    """The result of a run too short for any demand but one finished request."""
    return Result(1, 0.001, counts, Counter(), 0, Leftovers(), [])
