"""Prefill and decode on two hosts over mutual TLS, and what a stranger in their network reaches: nothing.

The hosts are network namespaces with links to one bridge (`hosts.py`). They are one kernel, where decode could read
prefill's memory, which no decode worker can on another host. So the processes of the second host see another boot id,
by which Baton, and UCX as well, tell hosts apart, and no ports for RDMA; nothing else is told to them. Process ids and
shared memory stay common to both: neither is looked at once the boot ids differ.
"""

import json
import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.listening import sockets_of
from tests.e2e.stack import wait_until
from tests.e2e.strangers import UNREACHABLE
from tests.e2e.test_pair import GREEDY, text_of, until_handed_off
from tests.e2e.test_ports import table
from tests.faults.clients import Client
from tests.faults.hosts import FIRST, LINK, SECOND, Connected, Hosts, connected_hosts
from tests.faults.namespace import num_sent
from tests.machine import NAMESPACES, REDIS, needs

pytestmark = [needs(NAMESPACES), needs(REDIS)]

BLOCK_SIZE, BLOCK_BYTES = 16, 2 * 2 * 2 * 16 * 16 * 4  # layers, heads, K and V, head dim, positions, float32
PROMPT_LEN, NUM_TOKENS, NUM_STREAMED = 440, 16, 400


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    with connected_hosts(model, tmp_path_factory.mktemp("hosts")) as connected:
        yield connected


@pytest.fixture
def stack(hosts: Connected) -> Hosts:
    """Healed before each test."""
    hosts.stack.heal()
    return hosts.stack


@pytest.mark.long
def test_kv_moves_as_bytes_over_the_link_though_every_worker_has_nixl(stack: Hosts):
    gateway, model, seeds = stack.gateway, stack.model, count(901)
    assert [set(worker["transports"]) for worker in gateway.ledger()["workers"]] == [{"nixl", "grpc"}] * 3

    def hand_over() -> tuple[list[int], str, int]:
        """A prompt that no worker has cached, its answer, and the bytes that went over the link meanwhile."""
        prompt = clear_prompt(model, next(seeds), PROMPT_LEN, NUM_TOKENS)
        before = num_sent(LINK)
        answer = gateway.client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
        return prompt, answer.choices[0].text, num_sent(LINK) - before

    prompt, text, sent = until_handed_off(gateway, 1, hand_over)
    assert text.rstrip("\ufffd") == text_of(model, generate(model, prompt, NUM_TOKENS).tokens)
    assert sent > PROMPT_LEN // BLOCK_SIZE * BLOCK_BYTES
    ways = re.findall(r'^baton_pair_transport{.*,transport="(\w+)",why="([^,"]+)', gateway.get("/metrics")[1], re.M)
    assert set(ways) == {("grpc", "not nixl: it is on another host")}


@pytest.mark.long
def test_a_chat_of_the_official_client_is_answered_at_the_host_s_address(stack: Hosts):
    assert stack.gateway.client.base_url.host == FIRST
    answer = stack.gateway.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=12
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 12


def test_no_port_serves_a_stranger(hosts: Connected, stack: Hosts):
    """All that listens is tried, whichever process it belongs to, and nothing listens for UDP.

    UCX, below NIXL, listens in each worker, and would take whoever comes: at loopback alone, so nobody can.
    """
    found = {host: hosts.on(host, lambda: list(sockets_of(Path("/proc/thread-self/net")))) for host in (FIRST, SECOND)}
    assert {each.kind for listening in found.values() for each in listening} == {"tcp"}
    hidden = {
        host: [each.port for each in listening if ip_address(each.address).is_loopback]
        for host, listening in found.items()
    }
    assert stack.gateway.admin_port in hidden[FIRST]
    assert [len(ports) for ports in hidden.values()] == [2, 2]  # the others: of UCX, in one worker and in two
    documented = {port.name: answer for port, answer in table(1).items()}
    expected = {f"{host}:{port}": UNREACHABLE for host, ports in hidden.items() for port in ports}
    expected |= {stack.address(name): documented["`--port` of a worker"] for name in stack.ports}
    expected |= {f"{FIRST}:{hosts.redis_port}": "TLS; refused without a certificate"}
    expected |= {f"{FIRST}:{stack.gateway.port}": documented["`--port`"]}
    expected |= {f"{FIRST}:{stack.gateway.grpc_port}": documented["`--grpc-port`"]}
    targets = [f"{host}:{each.port}" for host, listening in found.items() for each in listening]
    assert json.loads(hosts.ask_as_stranger(targets)) == expected


@pytest.mark.long
def test_a_stream_whose_decode_worker_is_killed_goes_on_at_the_other_one_of_its_host(stack: Hosts):
    """To the tokens of an undisturbed run."""
    prompt = clear_prompt(stack.model, 801, 100, NUM_STREAMED)
    generate(stack.model, prompt, NUM_STREAMED)  # before, not meanwhile
    client = Client(stack.gateway, stack.model, prompt, NUM_STREAMED)
    lost = stack.gateway.metric("baton_attempt_ends_total", reason="worker_lost")
    wait_until(lambda: bool(client.text), 60, "text")
    decode = [name for name in stack.ports if name.startswith("decode")]
    for name in decode:  # the stream stands still in its middle
        stack.workers[name].freeze()
    (row,) = stack.gateway.ledger()["rows"]
    (victim,) = [name for name in decode if stack.address(name) == row["decode"]]
    assert row["tokens_delivered"] < NUM_STREAMED
    stack.workers[victim].kill()
    for name in decode:
        stack.workers[name].thaw()
    assert client.is_alive()
    assert not client.is_lost()
    assert client.error is None
    assert not client.is_wrong()
    assert stack.gateway.metric("baton_attempt_ends_total", reason="worker_lost") == lost + 1
