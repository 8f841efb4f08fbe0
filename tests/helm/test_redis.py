"""The chart's Redis, run as a process: its users may do what gateways and workers do, and no more."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtransfer.ids import WorkerId
from loadtest.processes import free_ports
from services.gateway.api.generation import Refusal
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.quota import Ask
from services.gateway.keys.redis_quotas import RedisQuotas
from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import Client, connect
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.registry import Registry, WorkerRecord
from services.protocol.block_hash import BlockHash
from tests.e2e.stack import wait_until
from tests.helm.chart import Helm, arguments_of
from tests.helm.kubelet import SERVICE_IP, Container, Node

TIMEOUT_S = 60
WORKER = WorkerId(7)
BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(3)]
RECORD = WorkerRecord("127.0.0.1:9100", "prefill", WORKER, "model", "fingerprint", 16, 100)


@dataclass(frozen=True)
class Running:
    """A pod of Redis, and how its users reach it."""

    pod: Container
    port: int
    passwords: dict[str, str]

    def url(self, user: str) -> str:
        return f"redis://{user}:{self.passwords[user]}@{SERVICE_IP}:{self.port}"

    def connection(self, user: str) -> redis.Redis:
        return redis.Redis.from_url(self.url(user))


@pytest.fixture(scope="module")
def server(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    (port,) = free_ports(1)
    node = Node(helm.render(None, "--set", f"redis.port={port}"), tmp_path_factory.mktemp("redis"))
    pod = Container(node, "redis")
    passwords = {user: node.secret("demo-baton-redis", user) for user in ("gateway", "worker")}
    try:
        for probe in pod.probes:
            wait_until(partial(pod.passes, probe), TIMEOUT_S, f"the {probe} of Redis")
        yield Running(pod, port, passwords)
    finally:
        pod.process.kill()


@pytest.fixture
async def clients(server: Running) -> AsyncIterator[tuple[Client, Client]]:
    """A gateway's and a worker's."""
    gateway, worker = (connect(server.url(user), TIMEOUT_S) for user in ("gateway", "worker"))
    yield gateway, worker
    await gateway.aclose()
    await worker.aclose()


async def test_a_worker_registers_publishes_and_sweeps_and_a_gateway_reads(clients: tuple[Client, Client]):
    gateway, worker = clients
    registry, publisher = Registry(worker), IndexPublisher(worker, WORKER)
    assert await registry.renew(publisher.id, RECORD, confirmed=False)
    publisher.change(BLOCKS[0], BLOCKS, [])
    await publisher.flush()
    assert await Registry(gateway).workers() == [RECORD]
    index = RedisPrefixIndex(gateway, CircuitBreaker(time.monotonic))
    assert await index.depths(BLOCKS) == {WORKER: 3}
    await registry.leave([publisher.id])
    assert await registry.sweep() == 1
    assert await Registry(gateway).workers() == []


async def test_a_gateway_keeps_reads_and_deletes_responses(clients: tuple[Client, Client]):
    store = RedisResponseStore(clients[0], CircuitBreaker(time.monotonic), 60)
    assert await store.put("default", "resp_1", b"words")
    assert await store.get("default", "resp_1") == b"words"
    assert await store.delete("default", "resp_1")
    assert await store.get("default", "resp_1") is None
    assert (await store.renew("default", "resp_1")).lost
    assert await store.update("default", "resp_1", b"words", anew=True) == b"words"
    await store.ask_for_end("default", "resp_1")
    assert not await store.claim("default", "resp_1")
    assert (await store.renew("default", "resp_1")).end_wanted


async def test_a_gateway_counts_what_keys_use(clients: tuple[Client, Client]):
    quotas = RedisQuotas(clients[0], CircuitBreaker(time.monotonic))
    asked = Ask("key", RateLimits(requests_per_minute=2, tokens_per_minute=100, max_concurrent=1), "lease", 10)
    taken = await quotas.take(asked)
    assert (taken.alone, taken.refusal) == (False, None)
    assert (await quotas.take(replace(asked, lease="second"))).refusal is Refusal.KEY_CONCURRENT
    await quotas.settle(asked, taken, 95)
    assert (await quotas.take(replace(asked, lease="third"))).refusal is Refusal.KEY_TOKENS
    await quotas.beat()
    assert not quotas.alone


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("worker", ["get", "baton:response:default:resp_1"]),
        ("worker", ["set", "baton:response:default:resp_1", "other words"]),
        ("worker", ["set", "baton:limits:default", "0"]),
        ("gateway", ["hset", "baton:{workers}:records", "id", "a worker of mine"]),
        ("gateway", ["zadd", "baton:{workers}:leases", "9e15", "id"]),
        ("gateway", ["keys", "*"]),
        ("gateway", ["get", "another program's"]),
        ("gateway", ["eval", "return redis.call('HSET', KEYS[1], 'a', 'b')", "1", "baton:{workers}:records"]),
        *((user, command) for user in ("gateway", "worker") for command in (["flushall"], ["config", "get", "*"])),
        *((user, command) for user in ("gateway", "worker") for command in (["acl", "list"], ["shutdown"])),
    ],
)
def test_what_is_not_a_users_business_is_refused(server: Running, user: str, command: list[str]):
    with server.connection(user) as connection, pytest.raises(redis.exceptions.NoPermissionError):
        connection.execute_command(*command)


def test_nobody_without_a_password_does_more_than_ask_whether_redis_lives(server: Running):
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, retry=once) as anybody, pytest.raises(redis.AuthenticationError):
        anybody.ping()
    with redis.Redis(port=server.port, username="probe", password="probe") as probe:
        assert probe.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            probe.get("baton:response:default:resp_1")


def test_passwords_are_in_no_command_line(server: Running):
    line = " ".join(psutil.Process(server.pod.process.pid).cmdline())
    assert not [password for password in server.passwords.values() if password in line]


def test_what_was_not_used_for_longest_goes_where_memory_ends(helm: Helm):
    """As `baton up` has it; none of the users may ask the server."""
    (script,) = arguments_of(helm.render(), "redis")
    assert "maxmemory 256mb\nmaxmemory-policy allkeys-lru\n" in script
    assert 'save ""\nappendonly no\n' in script
