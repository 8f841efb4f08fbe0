"""Prompts that end engines, neighbours of another version, clocks that jump, a transport that aborts its process."""

import os
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path

import openai
import pytest

from services.protocol.versions import PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.e2e.test_pair import GREEDY
from tests.faults.case import Case, busiest, case_of, in_midstream
from tests.faults.rows import long, row
from tests.faults.supervised import supervised
from tests.faults.table import VERDICT
from tests.faults.worker_hooks import (
    FAULT_SIGNAL,
    POISON,
    fail_on_poison,
    hang_on_signal,
    jump_on_signal,
    speak_version,
)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Stack]:
    """Two of each role."""
    with running_stack(model, prefill=2, decode=2, options=["--max-num-batched-tokens", "37"]) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """Healed after each case."""
    return running


def restart(stack: Stack, name: str, prepare: Callable[[], None] | None = None) -> None:
    """Ends a worker and starts it again."""
    stack.workers[name].kill()
    stack.start(name, prepare=prepare)


@pytest.mark.long
@row(45)
def test_a_prompt_that_ends_engines_ends_in_one_error_and_the_others_go_on(stack: Stack, case: Case):
    prompts = case.prompts(4)
    for name in stack.workers:
        restart(stack, name, fail_on_poison)
    stack.gateway.wait_for_workers(4)
    case.stream(2)
    case.fault()
    with supervised(stack, fail_on_poison) as started:
        case.ask(prompts)
        with pytest.raises(openai.APIStatusError) as error:
            stack.gateway.client.completions.create(prompt=[POISON, 5, 6, 7], max_tokens=5, **GREEDY)
        assert error.value.status_code == 500
        for each in case.clients:
            each.join(120)
        wait_until(lambda: len(started) >= 3, 60, "the end of three workers")  # an engine says that it failed before
    for name in stack.workers:
        restart(stack, name)
    stack.gateway.wait_for_workers(4)
    case.settle()


@long
def test_requests_at_a_worker_whose_engine_hangs_go_on_elsewhere(stack: Stack, case: Case):
    """Its process lives, answers pings and sends pulses; it ends itself when a step has taken far too long."""
    for name in ("decode-0", "decode-1"):
        restart(stack, name, hang_on_signal)
    stack.gateway.wait_for_workers(4)
    with in_midstream(stack, case) as victim:
        os.kill(stack.workers[victim].pid, FAULT_SIGNAL)
    wait_until(lambda: not stack.workers[victim].running, 600, f"the end of {victim}")
    case.settle()
    for name in ("decode-0", "decode-1"):
        restart(stack, name)
    stack.gateway.wait_for_workers(4)


@long
@row(43)
def test_a_neighbour_of_another_minor_version_works_and_one_of_another_major_is_left_alone(stack: Stack, case: Case):
    prompts = case.prompts(6)
    case.fault()
    restart(stack, "prefill-0", partial(speak_version, PROTOCOL_MAJOR, PROTOCOL_MINOR + 1))
    stack.gateway.wait_for_workers(4)
    case.ask(prompts[:3])
    for each in case.clients:
        each.join(240)
    restart(stack, "prefill-0", partial(speak_version, PROTOCOL_MAJOR + 1, 0))
    stack.gateway.wait_for_workers(3)
    case.ask(prompts[3:])
    for each in case.clients:
        each.join(240)
    assert stack.gateway.num_connected() == 3
    restart(stack, "prefill-0")
    case.settle()


@pytest.mark.long
@row(37)
def test_wall_clocks_that_jump_change_nothing(stack: Stack, case: Case, tmp_path: Path):
    """A day back, then two days ahead: what `time.time` says in every worker."""
    prompts, told = case.prompts(2), tmp_path / "jumps"
    told.touch()
    for name in stack.workers:
        restart(stack, name, partial(jump_on_signal, told))
    stack.gateway.wait_for_workers(4)
    case.stream(2)
    case.fault()
    for _ in range(2):
        for worker in stack.workers.values():
            os.kill(worker.pid, FAULT_SIGNAL)
        case.ask(prompts)
    case.settle()
    assert all(worker.running for worker in stack.workers.values())
    assert told.read_text().count("\n") == 2 * len(stack.workers), "a clock did not jump"


@pytest.mark.long
@row(44)
def test_the_end_of_the_first_of_many_prompts_over_one_prefix_holds_up_none(stack: Stack, case: Case):
    """Its handoff is cut by the end of its prefill worker; the others wait for the same blocks."""
    (shared,) = case.prompts(1, length=320)
    prompts = [[*shared[:319], 11 + number] for number in range(8)]
    case.fault()
    case.ask([shared, *prompts])
    wait_until(lambda: bool(stack.gateway.ledger()["rows"]), 30, "a request")
    victim = busiest(stack, "prefill")
    stack.workers[victim].kill()
    case.settle()


@long
@row(5)
def test_a_prefill_worker_that_thaws_late_spoils_nothing(stack: Stack, case: Case):
    prompts = case.prompts(6, length=180)
    case.fault()
    stack.workers["prefill-0"].freeze()
    case.ask(prompts)
    for each in case.clients:
        each.join(120)
    stack.workers["prefill-0"].thaw()
    stack.gateway.wait_for_workers(4)
    case.ask(prompts)
    case.settle()


@long
@row(38)
def test_failing_handoffs_cost_a_bounded_number_of_attempts(stack: Stack, case: Case):
    """Both prefill workers are frozen: no handoff can arrive."""
    prompts = case.prompts(12)
    before = stack.gateway.metric("baton_attempts_total")
    case.fault()
    for name in ("prefill-0", "prefill-1"):
        stack.workers[name].freeze()
    case.ask(prompts)
    for each in case.clients:
        each.join(120)
    attempts = stack.gateway.metric("baton_attempts_total") - before
    print(f"{attempts:g} attempts for {len(prompts)} requests")
    assert attempts <= 3 * len(prompts)
    case.settle()


@pytest.fixture(scope="module")
def over_tcp(model: Path) -> Iterator[Stack]:
    """Two of each role, whose NIXL reads go over TCP."""
    options = ["--max-num-batched-tokens", "37"]
    with running_stack(model, prefill=2, decode=2, options=options, environment={"UCX_TLS": "tcp"}) as stack:
        yield stack


@long
@row(42)
def test_requests_outlive_what_the_end_of_a_reader_over_tcp_does_to_its_producer(
    over_tcp: Stack, record_property: Callable[[str, object], None]
):
    """UCX over TCP may abort a process whose reader died. The worker is started again, as another one."""
    with case_of(over_tcp, lambda verdict: record_property(VERDICT, astuple(verdict))) as case:
        prompts = case.prompts(8, length=300)
        case.fault()
        with supervised(over_tcp) as started:
            case.ask(prompts)
            wait_until(lambda: any(each.text for each in case.clients), 60, "a first text")
            over_tcp.workers[busiest(over_tcp, "decode")].kill()
            for each in case.clients:
                each.join(120)
        print(f"started again: {', '.join(started)}")
        case.settle()
