"""Redis dies, restarts, hangs, is full, and holds what is wrong, while requests run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.prefix_index.redis_client import LEASES, RECORDS, tree_key
from services.prefix_index.registry import WorkerRecord
from services.protocol.block_hash import block_hashes, root_hash
from tests.e2e.stack import wait_until
from tests.faults.case import Case
from tests.faults.proxied import ProxiedStack, proxied_stack
from tests.faults.rows import row
from tests.redis_server import RedisServer, running_redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The stack's Redis."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def running(model: Path, redis: RedisServer) -> Iterator[ProxiedStack]:
    """Two of each role, which know of each other through Redis."""
    with proxied_stack(model, redis_url=redis.url) as stack:
        yield stack


@pytest.fixture
def stack(running: ProxiedStack) -> ProxiedStack:
    """Healed after each case."""
    return running


def until_found_again(stack: ProxiedStack, case: Case, prompt: list[int]) -> float:
    """Seconds until the index promises a prompt's blocks again. A gateway that has just come knows of none itself."""
    with stack.serving() as other:

        def found() -> bool:
            before = other.metric("baton_cached_tokens_predicted_total")
            other.client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
            return other.metric("baton_cached_tokens_predicted_total") > before

        return wait_until(found, 60, "a hit")


@pytest.mark.long
@row(26)
def test_service_goes_on_while_redis_is_dead(stack: ProxiedStack, case: Case, redis: RedisServer):
    prompts = case.prompts(4)
    case.stream(2)
    case.fault()
    redis.kill()
    case.ask(prompts)
    for each in case.clients:
        each.join(120)
    redis.start()
    case.settle()


@pytest.mark.long
@row(27)
def test_workers_publish_again_what_they_cache_to_a_redis_that_restarts_empty(
    stack: ProxiedStack, case: Case, redis: RedisServer
):
    (prompt,) = case.prompts(1)
    case.ask([prompt])[0].join(120)
    case.fault()
    redis.kill()
    redis.start()
    print(f"the index has the prompt again after {until_found_again(stack, case, prompt):.2f} s")
    case.ask([prompt])
    case.settle()


@row(28)
def test_a_wrong_entry_is_a_miss(stack: ProxiedStack, case: Case, redis: RedisServer):
    """The index says that every worker caches a prompt that none has computed."""
    (prompt,) = case.prompts(1)
    stored: list[bytes] = redis.admin.hvals(RECORDS)  # type: ignore[assignment]  # this client decodes nothing
    records = [WorkerRecord.from_json(raw) for raw in stored]
    assert len(records) == 4
    chain = block_hashes(root_hash(records[0].fingerprint), np.array(prompt, np.int32), records[0].block_size)
    leases: list[bytes] = redis.admin.zrange(LEASES, 0, -1)  # type: ignore[assignment]
    holders = b"".join(bytes.fromhex(id.decode()) for id in leases)
    redis.admin.hset(tree_key(chain[0]), mapping=dict.fromkeys(chain, holders))
    before = stack.gateway.metric("baton_cached_tokens_predicted_total")
    case.fault()
    case.ask([prompt])
    case.settle()
    assert stack.gateway.metric("baton_cached_tokens_predicted_total") - before == len(chain) * records[0].block_size


@row(29)
def test_a_redis_that_hangs_costs_a_bounded_wait(stack: ProxiedStack, case: Case, redis: RedisServer):
    prompts = case.prompts(4)
    case.fault()
    redis.freeze()
    try:
        case.ask(prompts)
        for each in case.clients:
            each.join(120)
        assert not any(each.is_alive() for each in case.clients), "they wait until Redis goes on"
    finally:
        redis.thaw()
    case.settle()


@row(30)
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_service_goes_on_with_a_redis_that_takes_nothing(stack: ProxiedStack, case: Case, redis: RedisServer, how: str):
    prompts = case.prompts(4)
    case.fault()
    if how == "full":
        redis.admin.config_set("maxmemory", "1")
    else:
        redis.admin.config_set("min-replicas-to-write", 1)
    try:
        case.ask(prompts)
        for each in case.clients:
            each.join(120)
    finally:
        redis.admin.config_set("maxmemory", "0")
        redis.admin.config_set("min-replicas-to-write", 0)
    case.settle()
