"""Clients that leave, or do not read: what was done for them ends, and everybody else is served."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import wait_until
from tests.faults.case import Case, standing
from tests.faults.clients import LeavingClient
from tests.faults.proxied import ProxiedStack, in_phase, is_taken, proxied_stack
from tests.faults.rows import row

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


def leave_during(
    stack: ProxiedStack, case: Case, phase: str, role: str, begin: Callable[[], list[LeavingClient]]
) -> None:
    """Clients leave while their requests are in a phase and take blocks of a role, which is the fault.

    Their requests end while no worker goes on: not because their answers did. Then no block is taken.
    """
    for _ in range(20):
        clients = begin()
        wait_until(lambda: (is_taken(stack, role) and in_phase(stack, phase)) or at_rest(stack), 240, f"one in {phase}")
        with standing(stack):
            is_found = is_taken(stack, role) and in_phase(stack, phase)
            if is_found:
                case.fault()
            for client in clients:
                client.leave()
            wait_until(lambda: not stack.gateway.ledger()["rows"], what="the end of the requests")
        stack.gateway.wait_for_baseline()  # before links that are silent are healed
        if is_found:
            case.settle()
            return
    raise AssertionError("requests were over, twenty times, before they were looked at")


def at_rest(stack: ProxiedStack) -> bool:
    return not stack.gateway.ledger()["rows"]


@pytest.mark.long
@row(11)
def test_what_was_computed_for_clients_that_leave_during_prefill_is_free(stack: ProxiedStack, case: Case):
    prompts = [[9 + number, *range(10, 480)] for number in range(40)]
    leave_during(
        stack, case, "prefill", "prefill", lambda: [LeavingClient(stack.gateway, prompt, 4) for prompt in prompts]
    )


@pytest.mark.long
@row(12)
def test_blocks_that_wait_for_their_reader_are_free_when_the_client_leaves(stack: ProxiedStack, case: Case):
    """The control stream is silent from prefill to decode: the first token is there, and decode hears of no block."""
    stack.proxies["prefill-0"].silence("decode")
    prompts = [[19 + number, *range(10, 90)] for number in range(4)]
    leave_during(
        stack, case, "handoff", "prefill", lambda: [LeavingClient(stack.gateway, prompt, 4) for prompt in prompts]
    )


@pytest.mark.long
@row(14)
def test_decoding_for_clients_that_leave_ends(stack: ProxiedStack, case: Case):
    prompts = [[29 + number, *range(10, 60)] for number in range(4)]
    leave_during(
        stack, case, "decode", "decode", lambda: [LeavingClient(stack.gateway, prompt, 400) for prompt in prompts]
    )


@pytest.mark.long
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
