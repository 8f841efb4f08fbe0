"""Workers and gateways are killed and frozen, and links between them spoilt, while requests run."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from loadtest.tcp_proxy import Way
from protos import worker_pb2, worker_pb2_grpc
from tests.e2e.stack import Stack, wait_until
from tests.e2e.test_pair import GREEDY
from tests.faults.case import Case, busiest, in_midstream
from tests.faults.proxied import ProxiedStack, proxied_stack, until_at, until_phase
from tests.faults.rows import long, row
from tests.seeds import first_of
from tests.worker.client import TestGateway


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[ProxiedStack]:
    """Two of each role."""
    with proxied_stack(model) as stack:
        yield stack


@pytest.fixture
def stack(running: ProxiedStack) -> ProxiedStack:
    """Healed after each case. The proxies know who dials: else a fault would be for nobody."""
    for proxy in running.proxies.values():
        assert "gateway" in proxy.clients()
        assert "?" not in proxy.clients()
    return running


@pytest.mark.long
@row(1)
def test_prompts_under_way_at_a_prefill_worker_that_is_killed_go_elsewhere(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6, length=180)
    stack.workers["prefill-0"].freeze()  # what it is given stays under way there
    case.ask(prompts)
    until_at(stack, "prefill-0")
    case.fault()
    stack.workers["prefill-0"].kill()
    case.settle()


@row(2)
def test_prompts_whose_prefill_worker_dies_before_their_blocks_are_read_are_computed_elsewhere(
    stack: ProxiedStack, case: Case
):
    prompts = case.prompts(4)
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].silence("decode", (Way.TO_CLIENT,))  # decode hears of no block
    case.ask(prompts)
    until_phase(stack, "handoff")
    victim = busiest(stack, "prefill")
    case.fault()
    stack.workers[victim].kill()
    for proxy in stack.proxies.values():
        proxy.heal()
    case.settle()


@pytest.mark.long
@row(4)
def test_prompts_at_a_frozen_prefill_worker_go_elsewhere(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6, length=180)
    case.fault()
    stack.workers["prefill-0"].freeze()
    case.ask(prompts)
    until_at(stack, "prefill-0")
    case.settle()


@pytest.mark.long
@row(6)
def test_requests_placed_at_a_decode_worker_that_dies_continue_elsewhere(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6)
    stack.workers["decode-0"].freeze()
    case.ask(prompts)
    until_at(stack, "decode-0")
    case.fault()
    stack.workers["decode-0"].kill()
    case.settle()


@row(7)
def test_requests_outlive_a_decode_worker_that_is_killed(stack: ProxiedStack, case: Case):
    with in_midstream(stack, case) as victim:
        stack.workers[victim].kill()
    case.settle()


@pytest.mark.long
@row(8)
def test_a_frozen_decode_worker_is_noticed_and_its_late_words_are_dropped(stack: ProxiedStack, case: Case):
    with in_midstream(stack, case) as victim:
        kept = stack.workers.pop(victim)  # which does not go on with the others
    stack.workers[victim] = kept
    stack.gateway.wait_for_workers(3, 240)
    for each in case.clients:
        each.join(120)
    kept.thaw()
    case.settle()


@long
@row(9)
def test_with_every_worker_dead_new_requests_are_refused_and_running_ones_wait(stack: ProxiedStack, case: Case):
    case.stream(2)
    case.fault()
    for process in stack.workers.values():
        process.kill()
    stack.gateway.wait_for_workers(0, 120)
    refused(stack)
    stack.heal()
    case.settle()


@pytest.mark.long
@row(10)
def test_with_every_prefill_worker_dead_decode_serves_alone(stack: ProxiedStack, case: Case):
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.workers[name].kill()
    stack.gateway.wait_for_workers(2, 120)
    case.stream(2)
    case.settle()


@long
@row(16)
def test_silence_between_one_prefill_worker_and_decode_costs_no_request(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6)
    case.fault()
    stack.proxies["prefill-0"].silence("decode")
    case.ask(prompts)
    case.settle()


@pytest.mark.long
@row(17)
def test_requests_outlive_connections_that_are_reset(stack: ProxiedStack, case: Case):
    with in_midstream(stack, case):
        assert sum(proxy.reset() for proxy in stack.proxies.values())
    case.settle()


@pytest.mark.few(1)
@row(20)
@pytest.mark.parametrize("way", Way)
def test_requests_outlive_a_partition_of_one_direction(stack: ProxiedStack, case: Case, way: Way):
    with in_midstream(stack, case) as victim:
        stack.proxies[victim].silence("gateway", (way,))
    case.settle()


async def fingerprint_at(port: int) -> bytes:
    """The fingerprint that a worker names in its hello, as it goes over the wire."""
    async with TestGateway(id=21).connect(port) as stream:
        assert stream.hello is not None
        return stream.hello.fingerprint.encode()


@pytest.mark.long
@row(21)
def test_a_handshake_that_names_another_model_is_refused_and_costs_no_request(stack: ProxiedStack, case: Case):
    """Prefill refuses decode in words, and decode's requests are served another way."""
    prompts = case.prompts(4)
    name = asyncio.run(fingerprint_at(stack.ports["prefill-0"]))
    case.fault()
    for each in ("prefill-0", "prefill-1"):
        stack.proxies[each].replace("decode", name, name[::-1], Way.TO_SERVER)
        stack.proxies[each].reset("decode")
    completed = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    case.ask(prompts)
    for client in case.clients:
        client.join(60)
    assert stack.gateway.metric("baton_handoffs_total", outcome="completed") == completed
    assert all(worker.running for worker in stack.workers.values())
    case.settle()


@pytest.mark.long
@row(25)
def test_a_prefill_worker_restarts_on_its_address_under_load(stack: ProxiedStack, case: Case):
    prompts = case.prompts(4)
    case.stream(2)
    case.fault()
    stack.workers["prefill-0"].kill()
    stack.start("prefill-0")
    case.ask(prompts)
    stack.gateway.wait_for_workers(4)
    case.settle()


@row(31)
def test_a_gateway_that_is_killed_leaves_nothing_on_the_workers(stack: ProxiedStack, case: Case):
    cut = case.stream()
    case.fault()
    stack.gateway.kill()
    stack.gateway.start()
    case.settle(cut=cut)


@pytest.mark.long
@row(31)
def test_the_end_of_one_of_two_gateways_cuts_its_own_streams_alone(stack: ProxiedStack, case: Case):
    with stack.serving() as other:
        cut = case.stream(2)
        case.stream(2, other)
        case.fault()
        stack.gateway.kill()
        stack.gateway.start()
        case.settle(cut=cut)
        other.wait_for_baseline()


@long
@row(40)
def test_with_every_decode_worker_dead_new_requests_are_refused_and_running_ones_wait(stack: ProxiedStack, case: Case):
    case.stream(2)
    case.fault()
    stack.workers["decode-0"].kill()
    stack.workers["decode-1"].kill()
    stack.gateway.wait_for_workers(2, 120)
    refused(stack)
    stack.start("decode-0")
    case.settle()


@long
@row(46)
def test_control_streams_that_break_again_and_again_cost_no_request(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6)
    case.stream(2)
    case.fault()
    case.ask(prompts)
    for _ in range(20):
        stack.proxies["prefill-0"].reset("decode")
        stack.proxies["prefill-1"].reset("decode")
        time.sleep(0.05)
    case.settle()


@pytest.mark.long
@row(48)
def test_prefill_and_decode_silent_towards_each_other_cost_no_request(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6)
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].silence("decode")
    case.ask(prompts)
    case.settle()


@pytest.mark.long
@row(49)
def test_a_living_worker_whose_port_is_refused_costs_no_request(stack: ProxiedStack, case: Case):
    prompts = case.prompts(6)
    case.stream(2)
    case.fault()
    stack.proxies["prefill-0"].refuse()
    stack.proxies["prefill-0"].reset("decode")
    case.ask(prompts)
    case.settle()


def refused(stack: Stack) -> None:
    """Asserts that a request is refused, with the word when to come again."""
    with pytest.raises(openai.InternalServerError) as error:
        stack.gateway.client.completions.create(prompt=[5, 6, 7], max_tokens=5, **GREEDY)
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"]


def until_ended(stack: Stack, name: str) -> None:
    """Waits until a worker that was told to end has ended, without an error."""
    worker = stack.workers[name]
    wait_until(lambda: not worker.running, 240, f"the end of {name}")
    assert worker._process.exitcode == 0


@pytest.mark.long
@row(32)
def test_a_decode_worker_that_gets_sigterm_loses_nothing(stack: ProxiedStack, case: Case):
    with in_midstream(stack, case) as victim:
        stack.workers[victim]._process.terminate()
    until_ended(stack, victim)
    case.settle()


@pytest.mark.long
@row(33)
def test_streams_that_outlast_a_drain_continue_elsewhere(stack: ProxiedStack, case: Case):
    for _ in range(10):
        with contextlib.ExitStack() as channels:
            drains = {name: channels.enter_context(drain_of(stack, name)) for name in ("decode-0", "decode-1")}
            with in_midstream(stack, case) as victim:
                draining = drains[victim].future(worker_pb2.DrainRequest(timeout_s=0.2), timeout=120)
            moved = draining.result().moved
        until_ended(stack, victim)
        if moved:
            break
        stack.heal()  # where the machine stood still, the streams were over before any had to move
    assert moved, "no stream outlasted a drain, ten times"
    case.settle()


@contextlib.contextmanager
def drain_of(stack: Stack, name: str) -> Iterator[Any]:
    """The call that drains a worker, over a channel that is connected."""
    with grpc.insecure_channel(f"127.0.0.1:{stack.ports[name]}") as channel:
        grpc.channel_ready_future(channel).result(120)
        yield worker_pb2_grpc.WorkerStub(channel).Drain


@pytest.mark.long
@row(34)
@pytest.mark.parametrize("names", first_of(1, [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]))
def test_every_worker_is_restarted_in_turn_under_load(stack: ProxiedStack, case: Case, names: tuple[str, ...]):
    for name in names:
        case.stream(2)
        case.fault()
        stack.workers[name]._process.terminate()
        until_ended(stack, name)
        stack.start(name)
        stack.gateway.wait_for_workers(4)
    case.settle()
