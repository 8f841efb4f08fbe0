"""Handoffs whose blocks are bytes on a connection, through which faults can be put while they move."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.tcp_proxy import Way
from tests.e2e.stack import wait_until
from tests.faults.case import Case, busiest
from tests.faults.clients import LeavingClient
from tests.faults.proxied import ProxiedStack, proxied_stack, until_phase, until_taken
from tests.faults.rows import long, row

_SLOW = 40_000.0  # bytes a second; a block of the model has 4 KiB, so that a prompt of 400 tokens takes seconds


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[ProxiedStack]:
    """Two prefill workers and two decode workers that read over gRPC."""
    with proxied_stack(model, "--transport", "grpc") as stack:
        yield stack


@pytest.fixture
def stack(running: ProxiedStack) -> ProxiedStack:
    """Healed after each case; pairs that the last one spoilt are left alone for a while, so it waits for a handoff."""
    gateway = running.gateway

    def hands_off() -> bool:
        before = gateway.metric("baton_handoffs_total", outcome="completed")
        gateway.client.completions.create(model="tiny", prompt=[7, 8, 9], max_tokens=3)
        time.sleep(0.1)
        return gateway.metric("baton_handoffs_total", outcome="completed") > before

    wait_until(hands_off, 60, "a handoff")
    return running


def slow_reads(stack: ProxiedStack) -> None:
    """Lets blocks come so slowly that the next fault finds them on their way."""
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].slow("decode", _SLOW, (Way.TO_CLIENT,))


def until_read(stack: ProxiedStack) -> None:
    """Waits for a handoff whose prompt is computed and whose blocks are on their way."""
    until_phase(stack, "handoff")
    time.sleep(0.2)
    assert any(entry["phase"] == "handoff" for entry in stack.gateway.ledger()["rows"])


@pytest.mark.long
@row(3)
def test_requests_outlive_a_prefill_worker_that_dies_in_the_middle_of_a_read(stack: ProxiedStack, case: Case):
    prompts = case.prompts(4, length=400)
    slow_reads(stack)
    case.ask(prompts)
    until_read(stack)
    victim = busiest(stack, "prefill")
    case.fault()
    stack.workers[victim].kill()
    for proxy in stack.proxies.values():
        proxy.heal()
    case.settle()


@pytest.mark.long
@row(13)
def test_blocks_that_are_being_read_for_a_client_that_leaves_are_free_soon(stack: ProxiedStack, case: Case):
    slow_reads(stack)
    clients = [LeavingClient(stack.gateway, [9 + number, *range(10, 400)], 4) for number in range(4)]
    until_read(stack)
    until_taken(stack, "decode")
    case.fault()
    for client in clients:
        client.leave()
    stack.gateway.wait_for_baseline()  # before the links are healed
    case.settle()


@long
@row(19)
def test_requests_over_a_narrow_link_take_longer_and_are_right(stack: ProxiedStack, case: Case):
    """The link's queue is bounded by what decode asks for; the time without news is the time of the bytes."""
    prompts = case.prompts(4, length=300)
    case.fault()
    slow_reads(stack)
    case.ask(prompts)
    case.settle()


@long
@row(23)
def test_acknowledgements_that_come_late_free_nothing_twice(stack: ProxiedStack, case: Case):
    prompts = case.prompts(4)
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].delay("decode", 1.5, (Way.TO_SERVER,))
    case.ask(prompts)
    wait_until(lambda: all(each.text for each in case.clients), 60, "text for everybody")
    case.ask(prompts)
    case.settle()


@long
@row(22)
def test_blocks_whose_acknowledgement_is_lost_are_free_when_their_lease_ends(stack: ProxiedStack, case: Case):
    prompts = case.prompts(4, length=400)
    slow_reads(stack)
    case.ask(prompts)
    until_read(stack)
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].silence("decode", (Way.TO_SERVER,))
    for each in case.clients:
        each.join(100)
    stack.gateway.wait_for_baseline()  # before the links are healed
    case.settle()


@long
@row(24)
def test_a_read_that_its_lease_does_not_outlast_is_not_used(stack: ProxiedStack, case: Case):
    """Silent in the middle of a read, the control stream ends, and with it, after its grace, the lease."""
    prompts = case.prompts(4, length=400)
    slow_reads(stack)
    case.ask(prompts)
    until_read(stack)
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.proxies[name].silence("decode")
    for each in case.clients:
        each.join(100)
    case.settle()
