"""What people are shown of the dispatch side: every worker, also one that went, pairs that are avoided, prefixes."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.ids import WorkerId
from services.config import HandoffMode, WorkerRole
from services.gateway.dispatch import lives
from services.gateway.dispatch.lives import WorkerLives
from services.gateway.dispatch.lost_links import in_plain_words
from services.gateway.dispatch.prefix_hits import MAX_NAMES, MAX_SHOWN, WINDOW_S, WINDOWS, PrefixHits
from services.gateway.overview import BlockUse, WorkerOverview, WorkerState
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.frames import Load
from services.protocol.messages import BlockEvents
from services.protocol.outcomes import FailureCode, FinishReason
from tests.gateway.dispatch_stack import (
    PREFILL,
    PROMPT,
    Stack,
    decode_worker,
    eventually,
    first,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import empty_frame, serving, worker_hello


def shown(stack: Stack, address: str) -> WorkerOverview:
    (found,) = (worker for worker in stack.dispatcher.overseen.overview().workers if worker.address == address)
    return found


async def test_a_worker_is_shown_with_its_blocks_and_what_it_computed():
    decode = decode_worker()
    async with running(decode) as stack:
        load = Load(available_blocks=40, quarantined_blocks=3, computed_tokens=99, evicted_blocks=5)
        decode.say(empty_frame(load=load))
        await eventually(lambda: shown(stack, decode.address).computed_tokens == 99)
        worker = shown(stack, decode.address)
        assert (worker.state, worker.why, worker.restarted) == (WorkerState.OK, None, 0)
        assert (worker.blocks, worker.evicted_blocks) == (BlockUse(21, 64, 3), 5)
        assert worker.described == stack.live[0]
        began, told = worker.since, time.time()
        decode.say(empty_frame(load=replace(load, draining=True)))
        await eventually(lambda: shown(stack, decode.address).state is WorkerState.DRAINING)
        since = shown(stack, decode.address).since
        assert began < told <= since <= time.time()
        decode.say(empty_frame(load=replace(load, draining=True, running=1)))
        await eventually(lambda: shown(stack, decode.address).described["running"] == 1)
        assert shown(stack, decode.address).since == since, "it has drained since then"
        decode.say(empty_frame(load=load))
        await eventually(lambda: shown(stack, decode.address).state is WorkerState.OK)
        assert shown(stack, decode.address).since > since


async def test_a_worker_that_went_is_gone_with_the_reason_and_comes_back_as_restarted():
    decode = decode_worker()
    async with running(decode) as stack:
        began = shown(stack, decode.address).since
        decode.refuses = "not now"  # so that it stays away
        decode.break_stream()
        await eventually(lambda: shown(stack, decode.address).state is not WorkerState.OK)
        await eventually(lambda: shown(stack, decode.address).state is WorkerState.REFUSED)
        decode.refuses, decode.hello = "", worker_hello(WorkerRole.DECODE, 0xD3)
        await stack.connected(1)
        worker = shown(stack, decode.address)
        assert (worker.state, worker.restarted, worker.why) == (WorkerState.OK, 1, None)
        assert worker.since > began
        decode.break_stream()  # and the same worker comes back
        await decode.until(lambda: len(decode.hellos) == 3)
        await stack.connected(1)
        assert shown(stack, decode.address).restarted == 1


async def test_the_end_of_a_stream_is_seen_at_once_with_its_reason():
    decode = decode_worker()
    async with running() as stack:
        async with serving(decode):
            port = int(decode.address.rpartition(":")[2])
            stack.dispatcher.set_addresses([decode.address])
            await stack.connected(1)
        await eventually(lambda: shown(stack, decode.address).state is WorkerState.GONE)
        worker = shown(stack, decode.address)
        await eventually(lambda: shown(stack, decode.address).why == "nothing listens at its address")
        assert (worker.described["role"], worker.blocks, worker.computed_tokens) == ("decode", None, None)
        stack.dispatcher.set_addresses([])  # as the registry says it once its lease is over
        worker = shown(stack, decode.address)
        assert (worker.state, "UNAVAILABLE" in (worker.detail or "")) == (WorkerState.GONE, True)
        decode.hello = worker_hello(WorkerRole.DECODE, 0xD3)
        async with serving(decode, port):
            stack.dispatcher.set_addresses([decode.address])
            await stack.connected(1)
            assert shown(stack, decode.address).restarted == 1


async def test_workers_that_never_came_are_shown_too():
    decode = decode_worker(protocol_major=2)
    async with serving(decode), running(addresses=("127.0.0.1:1", decode.address)) as stack:
        stack.dispatcher.set_addresses(["127.0.0.1:1", decode.address], {"other:1": "it serves another model"})
        await eventually(lambda: shown(stack, decode.address).state is WorkerState.REFUSED)
        states = {worker.address: worker.state for worker in stack.dispatcher.overseen.overview().workers}
        assert states == {
            "127.0.0.1:1": WorkerState.CONNECTING,
            decode.address: WorkerState.REFUSED,
            "other:1": WorkerState.REFUSED,
        }
        refused = shown(stack, "other:1")
        assert (refused.why, refused.described) == ("it serves another model", {"address": "other:1"})
        stack.dispatcher.set_addresses([], {"other:1": "it serves another model"})
        assert shown(stack, "other:1").since == refused.since
        assert not stack.dispatcher.overseen.overview().ready


def test_what_is_kept_of_workers_that_went_has_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lives, "MAX_KEPT", 3)
    kept = WorkerLives()
    for number in range(5):
        kept.note_up(f"a:{number}", WorkerId(number), 100.0)
        kept.note_gone(f"a:{number}", {"role": "decode"}, 100.0 + number)
    assert [address for address, _ in kept.gone(105.0)] == ["a:2", "a:3", "a:4"]
    kept.note_up("a:3", WorkerId(3), 106.0)
    assert [address for address, _ in kept.gone(106.0)] == ["a:2", "a:4"]
    late = 105 + lives.KEPT_S
    assert list(kept.gone(late)) == []
    assert kept.get("a:4", late) is None
    assert [address for address, _ in kept.gone(103.5 + lives.KEPT_S)] == ["a:4"], "who looks changes nothing"
    life = kept.get("a:3", late)
    assert life is not None
    assert (life.is_up, life.restarted) == (True, 0)
    kept.note_up("a:4", WorkerId(5), late)
    again = kept.get("a:4", late)
    assert again is not None
    assert again.restarted == 0, "what went so long ago is no life before"


def test_a_worker_that_drains_does_so_since_then_whatever_becomes_of_its_stream():
    kept = WorkerLives()
    kept.note_up("a:1", WorkerId(1), 1.0)
    kept.note_draining("a:1", True, 5.0)
    kept.note_gone("a:1", {}, 6.0)
    kept.note_up("a:1", WorkerId(1), 7.0)
    kept.note_draining("a:1", True, 8.0)
    life = kept.get("a:1", 9.0)
    assert life is not None
    assert (life.since, life.draining_since) == (7.0, 5.0)
    kept.note_up("a:1", WorkerId(2), 10.0)
    life = kept.get("a:1", 10.0)
    assert life is not None
    assert life.draining_since is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:71: Failed to connect "
            "to remote host: connect: Connection refused (111)",
            "nothing listens at its address",
        ),
        ("UNAVAILABLE: Socket closed", "its connection broke: it may have ended"),
        ("UNAVAILABLE: recvmsg:Connection reset by peer", "its connection broke: it may have ended"),
        ("UNAVAILABLE: keepalive watchdog timeout", "it does not answer pings"),
        ("UNAVAILABLE: connect: No route to host (113)", "the network has no way to its address"),
        ("UNAVAILABLE: Ssl handshake failed: SSL_ERROR_SSL", "TLS with it failed"),
        ("it ended the stream (OK: no words)", "it ended its stream"),
        ("UNIMPLEMENTED: Method not found!", "what listens at its address is no worker"),
        ("it ended the stream (FAILED_PRECONDITION: not now)", "it refuses this gateway: not now"),
        ("INTERNAL: RST_STREAM", "its stream failed (INTERNAL)"),
        ("it was silent for 120 s", "it was silent for 120 s"),
    ],
)
def test_why_a_worker_is_not_there_is_said_in_plain_words(raw: str, words: str):
    assert in_plain_words(raw) == words


async def test_pairs_that_are_avoided_are_shown_with_who_says_so():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request()):
            prefill.fail(await prefill.submit(), FailureCode.HANDOFF)
            await eventually(lambda: len(stack.dispatcher.overseen.overview().avoided) == 1)
            (pair,) = stack.dispatcher.overseen.overview().avoided
            assert (pair.prefill, pair.decode, pair.why) == (prefill.address, decode.address, "a handoff failed")
            assert pair.since is not None
        decode.say(empty_frame(load=Load(available_blocks=64, avoid=(WorkerId(PREFILL),))))
        await eventually(lambda: stack.counts.loads[decode.address].avoid == (PREFILL,))
        assert [(pair.prefill, pair.decode) for pair in stack.dispatcher.overseen.overview().avoided] == [
            (prefill.address, decode.address)
        ]


async def test_a_handoff_is_told_with_the_addresses_of_its_pair():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request(max_tokens=2)) as generation:
            submit = await decode.submit()
            prefill.say_tokens(submit, [7])
            await first(generation)
            decode.say_tokens(submit, [8], after=1, finish=FinishReason.LENGTH)
            await read_all(generation)
        assert stack.counts.handoff_pairs == {(prefill.address, decode.address)}


async def test_who_waits_is_told_of_requests_in_flight():
    decode = decode_worker()
    async with (
        running(decode, handoff=HandoffMode.NEVER) as stack,
        stack.dispatcher.generate(request()) as generation,
    ):
        decode.say_tokens(await decode.submit(), [7, 8, 9])
        await first(generation)
        assert stack.dispatcher.overseen.overview().waiting == 0
        decode.refuses = "gone"
        decode.break_stream()
        await eventually(lambda: stack.dispatcher.overseen.overview().waiting == 1)


async def test_a_prefix_that_requests_find_cached_is_noted_while_somebody_looks():
    decode = decode_worker()
    chain = block_hashes(root_hash("f" * 32), np.array(PROMPT, np.int32), 4)
    decode.events_at_start = BlockEvents(0, True, chain, [])
    async with running(decode, handoff=HandoffMode.NEVER) as stack:

        async def ask(prompt: list[int]) -> None:
            async with stack.dispatcher.generate(request(prompt=prompt)):
                await asyncio.sleep(0)

        await eventually(lambda: len(decode.hellos) == 1)
        await asyncio.sleep(0.05)  # the events come after the hello
        await ask(PROMPT)
        assert stack.dispatcher.overseen.prefix_hits()[1] == [], "nobody looked"
        stack.dispatcher.overseen.watch_prefixes(True)
        await ask(PROMPT)
        await ask([*PROMPT, 1, 2, 3, 4, 5])
        await ask([9] * 10)
        _, (hit,) = stack.dispatcher.overseen.prefix_hits()
        assert (hit.name, hit.tokens, hit.uses, hit.saved_tokens) == (chain[1].hex(), 8, 2, 16)
        assert hit.workers == [decode.address]
        stack.dispatcher.overseen.watch_prefixes(False)
        assert stack.dispatcher.overseen.prefix_hits()[1] == []


def test_noted_prefixes_have_a_bound_in_time_and_number():
    now = [1000.0]
    hits = PrefixHits(lambda: now[0])
    for number in range(MAX_NAMES + 10):
        hits.note(BlockHash(number.to_bytes(8, "big")), 16 + number, "a:1")
    since, shown = hits.report()
    assert (since, len(shown), shown[0].tokens) == (1000.0, MAX_SHOWN, 16 + MAX_NAMES - 1)
    now[0] += WINDOW_S + 1
    again = BlockHash((5).to_bytes(8, "big"))
    for worker in ("b:1", "a:1"):
        hits.note(again, 21, worker)
    assert hits.report()[0] == 1000.0
    now[0] += (WINDOWS - 1) * WINDOW_S
    (found,) = hits.report()[1]
    assert (found.uses, found.saved_tokens, found.workers) == (2, 42, ["b:1", "a:1"])
    now[0] += WINDOWS * WINDOW_S
    assert hits.report() == (now[0], [])
