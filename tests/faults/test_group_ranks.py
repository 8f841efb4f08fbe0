"""A rank of a worker on two hosts dies, stands still, or is cut off: the worker ends as one, and nothing is lost.

A group of each role in turn, beside a worker of that role and two of the other one on one host; by each transport.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from tests.e2e.stack import wait_until
from tests.faults.case import NUM_STREAMED, Case, standing
from tests.faults.clients import Client, ColdClient
from tests.faults.group_hosts import GroupHosts, group_hosts
from tests.faults.rows import long, row
from tests.machine import NAMESPACES, needs

pytestmark = needs(NAMESPACES)

SOON_S = 20.0  # of a loaded machine; a loss is noticed within a second or so
_PHASES = {"prefill": ("prefill", "handoff"), "decode": ("handoff",)}  # of requests that need this side of a handoff


SIDES = [(role, transport) for role in ("prefill", "decode") for transport in ("grpc", "nixl")]


@pytest.fixture(scope="module", params=SIDES, ids="-".join)
def running(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GroupHosts]:
    role, transport = request.param
    options = ["--max-num-batched-tokens", "37"]
    with group_hosts(model, tmp_path_factory.mktemp(role), transport, role, workers=2, options=options) as stack:
        yield stack


@pytest.fixture
def stack(running: GroupHosts) -> GroupHosts:
    """Healed after each case."""
    return running


@pytest.fixture
def group(stack: GroupHosts) -> str:
    """The name of the worker of two hosts."""
    (name,) = stack.groups
    return name


def kill_rank_1(stack: GroupHosts, group: str) -> None:
    stack.others[group].kill()


def stop_rank_1(stack: GroupHosts, group: str) -> None:
    stack.stop_rank(group)


def cut_off_rank_1(stack: GroupHosts, group: str) -> None:
    stack.cut_off()


def kill_rank_0(stack: GroupHosts, group: str) -> None:
    stack.workers[group].kill()


FAULTS = [kill_rank_1, stop_rank_1, cut_off_rank_1, kill_rank_0]
Fault = Callable[[GroupHosts, str], None]
Moment = Callable[[GroupHosts, Case, str], contextlib.AbstractContextManager[None]]


def _in_handoff(stack: GroupHosts, group: str) -> bool:
    """True while a request is in the middle of a handoff from or to the group."""
    role = group.partition("-")[0]
    rows = stack.gateway.ledger()["rows"]
    return any(row[role] == stack.address(group) and row["phase"] in _PHASES[role] for row in rows)


def _in_stream(stack: GroupHosts, group: str) -> bool:
    """True while a stream has more than half of its tokens before it; of a decode worker, one of its own."""
    rows = [row for row in stack.gateway.ledger()["rows"] if row["phase"] == "decode"]
    if group.startswith("decode"):
        rows = [row for row in rows if row["decode"] == stack.address(group)]
    return any(0 < row["tokens_delivered"] < NUM_STREAMED // 2 for row in rows)


@contextlib.contextmanager
def _amid(
    stack: GroupHosts, case: Case, group: str, ask: Callable[[], list[Client]], holds: Callable[[GroupHosts, str], bool]
) -> Iterator[None]:
    """Asks until a condition holds while all workers stand still, in which the fault begins."""
    for _ in range(20):
        asked = ask()
        wait_until(partial(_there_or_over, stack, group, holds, asked), 120, f"what is asked for, at {group}")
        with standing(stack):
            if holds(stack, group):
                case.fault()
                yield
                return
    raise AssertionError(f"requests at {group} were over, twenty times, before they were looked at")


def _there_or_over(
    stack: GroupHosts, group: str, holds: Callable[[GroupHosts, str], bool], asked: list[Client]
) -> bool:
    return holds(stack, group) or not any(each.is_alive() for each in asked)


def in_handoff(stack: GroupHosts, case: Case, group: str) -> contextlib.AbstractContextManager[None]:
    """Has all workers stand still in the middle of a handoff from or to the group."""
    return _amid(stack, case, group, lambda: case.ask(case.prompts(6, length=300)), _in_handoff)


def in_streams(stack: GroupHosts, case: Case, group: str) -> contextlib.AbstractContextManager[None]:
    """Has all workers stand still in the middle of streams; of a decode worker, of some of its own."""
    return _amid(stack, case, group, lambda: case.start_streams(6, kind=ColdClient), _in_stream)


def all_of(stack: GroupHosts, group: str) -> list[psutil.Process]:
    """The processes of all ranks, and those that they have started."""
    ranks = [psutil.Process(each[group].pid) for each in (stack.workers, stack.others)]
    return [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]


def check_serves(stack: GroupHosts, case: Case, group: str) -> None:
    """New prompts are handed off by way of the group, to the right answers."""
    role = group.partition("-")[0]

    def completed() -> float:
        labels = {role: stack.address(group), "outcome": "completed"}
        return stack.gateway.settled("baton_pair_handoffs_total", **labels)

    before = completed()
    clients = case.ask(case.prompts(6))
    for each in clients:
        assert not each.is_lost()
        assert each.error is None
        assert not each.is_wrong()
    assert completed() > before


def until_ended(stack: GroupHosts, group: str, hurt: Fault) -> None:
    """Waits for the end of all ranks; one that was stopped ends when it goes on."""
    assert stack.workers[group].wait(SOON_S) == (-SIGKILL if hurt is kill_rank_0 else 1)
    if hurt is not stop_rank_1:
        assert stack.others[group].wait(SOON_S) == (-SIGKILL if hurt is kill_rank_1 else 1)


def check_nothing_is_left(stack: GroupHosts, processes: list[psutil.Process]) -> None:
    """Neither of the processes, nor blocks in quarantine."""
    wait_until(lambda: not any(each.is_running() for each in processes), SOON_S, "the end of all processes")
    assert stack.gateway.metric("baton_blocks_quarantined") == 0


@long
@row(55)
@pytest.mark.parametrize("moment", [in_handoff, in_streams])
@pytest.mark.parametrize("hurt", FAULTS)
def test_a_worker_of_two_hosts_ends_with_any_of_its_ranks_and_its_requests_go_on_elsewhere(
    stack: GroupHosts, case: Case, group: str, hurt: Fault, moment: Moment
) -> None:
    processes = all_of(stack, group)
    with moment(stack, case, group):
        hurt(stack, group)
    until_ended(stack, group, hurt)
    case.settle()
    check_nothing_is_left(stack, processes)
    check_serves(stack, case, group)


@long
@row(55)
@pytest.mark.parametrize("hurt", FAULTS)
def test_streams_wait_for_a_group_that_is_started_again_as_one_where_no_other_worker_is_left(
    stack: GroupHosts, case: Case, group: str, hurt: Fault
) -> None:
    """Ranks that start before their hosts can reach each other meet when they can."""
    processes = all_of(stack, group)
    with in_streams(stack, case, group):
        hurt(stack, group)
        stack.workers[group.replace("-0", "-1")].kill()  # no third one: a request that three lost is suspected itself
    until_ended(stack, group, hurt)
    stack.start_ended()
    stack.heal()
    case.settle()
    check_nothing_is_left(stack, processes)
    check_serves(stack, case, group)
