"""Pools, queues and file descriptors that are too small for what is asked at once."""

import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.stack import Stack, wait_until, worker_ports
from tests.e2e.test_pair import GREEDY
from tests.faults.case import Case, standing
from tests.faults.clients import LeavingClient
from tests.faults.rows import row

_SPARE_FILES = 12


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Stack]:
    """One of each role, with room for some 800 tokens each."""
    stack = Stack(model, worker_ports(1, 1), ["--max-num-batched-tokens", "37"], None, kv_memory="410KiB")
    with stack.running():
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """Healed after each case."""
    return running


@pytest.mark.long
@row(36)
def test_more_sequences_than_the_pool_holds_all_end(stack: Stack, case: Case):
    """Decode preempts, and computes again what it took."""
    (worker,) = [each for each in stack.gateway.ledger()["workers"] if each["role"] == "decode"]
    assert worker["num_blocks"] < 60
    case.fault()
    case.stream(4)
    case.settle()


@pytest.mark.long
@row(41)
def test_handoffs_between_two_full_pools_all_end(stack: Stack, case: Case):
    prompts = case.prompts(10, length=60)
    case.fault()
    case.ask(prompts * 8)
    case.settle()


@row(47)
def test_choices_of_one_prompt_that_are_aborted_at_block_borders_spoil_none(stack: Stack, case: Case):
    """Clients of four choices each leave at any time, over prompts of whole blocks that others compute too."""
    rng, prompts = random.Random(7), case.prompts(3, length=60)
    shared = [prompt[:64] if len(prompt) >= 64 else prompt[:48] for prompt in prompts]
    case.fault()
    case.ask(shared * 3)
    for _ in range(40):
        leaving = LeavingClient(stack.gateway, rng.choice(shared), 40, n=4, temperature=1)
        time.sleep(rng.random() * 0.03)
        leaving.leave()
    case.settle()


@pytest.mark.long
@row(35)
def test_more_requests_than_may_wait_are_refused_at_once_with_the_word_when_to_come_again(stack: Stack, case: Case):
    """`loadtest overload` measures what is left of the throughput."""
    prompts = case.prompts(8, length=40)
    with stack.serving("--max-waiting", "8") as small:
        case.fault()
        with standing(stack):  # none of those that fill the queue ends
            filling = [LeavingClient(small, prompt, 200) for prompt in prompts]
            wait_until(lambda: len(small.ledger()["rows"]) == len(prompts), what="a full queue")
            with pytest.raises(openai.RateLimitError) as error:
                small.client.completions.create(prompt=[5, 6, 7], max_tokens=5, **GREEDY)
        assert int(error.value.response.headers["retry-after"]) > 0
        for each in filling:
            each.leave()
        case.ask(prompts)
        case.settle()


@row(39)
def test_a_gateway_without_file_descriptors_goes_on_with_what_it_has(stack: Stack, case: Case):
    """Connections take the last ones; when they are closed, new clients are served again."""
    process = psutil.Process(stack.gateway.process.pid)
    case.stream(2)
    case.fault()
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + _SPARE_FILES,) * 2)
    idle = [socket.create_connection(("127.0.0.1", stack.gateway.port)) for _ in range(4 * _SPARE_FILES)]
    time.sleep(1)
    for each in case.clients:
        each.join(240)
    for connection in idle:
        connection.close()
    case.ask(case.prompts(2))
    case.settle()
