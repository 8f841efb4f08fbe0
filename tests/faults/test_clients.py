"""Clients that leave, or do not read: what was done for them ends, and everybody else is served."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.case import Case
from tests.faults.clients import LeavingClient
from tests.faults.proxied import ProxiedStack, proxied_stack, until_phase, until_taken
from tests.faults.rows import row

_SOON_S = 5.0  # for all blocks to be back; a machine at rest needs a tenth of a second
_MIB = 1 << 20


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[ProxiedStack]:
    """One of each role."""
    with proxied_stack(model, workers=1) as stack:
        yield stack


@pytest.fixture
def stack(running: ProxiedStack) -> ProxiedStack:
    """Healed after each case."""
    return running


def leave(case: Case, clients: list[LeavingClient]) -> None:
    """All clients leave, which is the fault; soon no block is taken."""
    case.fault()
    for client in clients:
        client.leave()
    case.settle()
    assert case.verdict is not None
    assert case.verdict.recovery_s < _SOON_S


@row(11)
def test_what_was_computed_for_clients_that_leave_during_prefill_is_free(stack: ProxiedStack, case: Case):
    prompts = [[9 + number, *range(10, 480)] for number in range(40)]
    clients = [LeavingClient(stack.gateway, prompt, 4) for prompt in prompts]
    until_taken(stack, "prefill")
    until_phase(stack, "prefill")
    leave(case, clients)


@row(12)
def test_blocks_that_wait_for_their_reader_are_free_when_the_client_leaves(stack: ProxiedStack, case: Case):
    """The control stream is silent from prefill to decode: the first token is there, and decode hears of no block."""
    stack.proxies["prefill-0"].silence("decode")
    clients = [LeavingClient(stack.gateway, [19 + number, *range(10, 90)], 4) for number in range(4)]
    until_phase(stack, "handoff")
    until_taken(stack, "prefill")
    leave(case, clients)


@row(14)
def test_decoding_for_clients_that_leave_ends(stack: ProxiedStack, case: Case):
    clients = [LeavingClient(stack.gateway, [29 + number, *range(10, 60)], 400) for number in range(4)]
    for client in clients:
        assert client.read()
    until_phase(stack, "decode")
    until_taken(stack, "decode")
    leave(case, clients)


@row(15)
def test_a_client_that_does_not_read_costs_bounded_memory_and_holds_up_nobody(stack: ProxiedStack, case: Case):
    """Its answer is some 30 MiB. The gateway takes no more tokens for it than the kernel's buffers take bytes."""
    gateway = psutil.Process(stack.gateway.process.pid)
    before = gateway.memory_info().rss
    slow = LeavingClient(stack.gateway, [39, *range(10, 60)], 400, n=32, logprobs=20)
    assert slow.read()
    case.fault()
    case.ask(case.prompts(4))
    case.stream(2)
    for each in case.clients:
        each.join(60)
    grown = gateway.memory_info().rss - before
    slow.leave()
    case.settle()
    assert grown < 64 * _MIB, f"{grown / _MIB:.0f} MiB"
