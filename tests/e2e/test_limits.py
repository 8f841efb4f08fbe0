"""Two gateways that share the limits of keys in Redis, while gateways and Redis are killed.

The refill of each limit takes longer than its test: what is counted does not depend on how fast the machine is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import openai
import pytest

from services.config import Right
from services.gateway.keys.changes import add_key
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.redis_quotas import LEASE_S
from tests.e2e.conftest import prompt_of
from tests.e2e.stack import Endpoint, Gateway, Stack, wait_until, worker_ports
from tests.e2e.test_pair import GREEDY
from tests.redis_server import RedisServer, age_packed, running_redis

PLAIN = "a-plain-key"
ADMITTED, REFUSED = 200, 429
TRIES = 4
T = TypeVar("T")


class Keys:
    """A file with keys that have one limit each. What counts requests takes keys that nobody has used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.three_requests = iter([self._key(requests_per_minute=3)[1] for _ in range(3 * TRIES)])
        self.four_requests = self._key(requests_per_minute=4)[1]
        self.tokens = iter([self._key(tokens_per_minute=210)[1] for _ in range(TRIES)])
        self.three_at_once = self._key(max_concurrent=3)[1]
        self.two_at_once = self._key(max_concurrent=2)[1]
        self.of_victim_id, self.of_victim = self._key(max_concurrent=2)

    def _key(self, **limits: int) -> tuple[str, str]:
        return add_key(self.path, "acme", [Right.API], 0, RateLimits(**limits))


@dataclass
class Shared:
    """A pair, and two gateways over one Redis, which know of each other."""

    stack: Stack
    redis: RedisServer
    keys: "Keys"
    gateways: tuple[Gateway, Gateway]

    def wait_until_shared(self) -> None:
        """Until both count in Redis, and know of each other and of no third."""

        def shares(gateway: Gateway) -> bool:
            found = gateway.metric("baton_limits_gateways"), gateway.metric("baton_limits_alone")
            return found == (2, 0)

        wait_until(lambda: all(map(shares, self.gateways)), what="limits that are shared")

    def while_shared(self, run: Callable[[], T]) -> T:
        """What `run` returns, once Redis answered both gateways while it ran.

        To a gateway on a machine that stalls, Redis is away for a moment.
        """
        for _ in range(TRIES):
            self.wait_until_shared()
            found = run()
            if not any(gateway.metric("baton_limits_alone") for gateway in self.gateways):
                return found
        raise AssertionError(f"Redis did not answer in time, {TRIES} times")

    @contextmanager
    def frozen_workers(self) -> Iterator[None]:
        """Requests run until the context ends."""
        for worker in self.stack.workers.values():
            worker.freeze()
        try:
            yield
        finally:
            for worker in self.stack.workers.values():
                worker.thaw()


@pytest.fixture(scope="module")
def shared(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    directory = tmp_path_factory.mktemp("limits")
    keys = Keys(directory / "keys.json")
    options = ("--keys", str(keys.path), "--api-key", PLAIN)
    with running_redis(directory) as redis:
        stack = Stack(llama, worker_ports(1, 1), [], redis.url, key=PLAIN)
        with stack.running(*options), stack.serving(*options) as second:
            yield Shared(stack, redis, keys, (stack.gateway, second))


def client_of(gateway: Endpoint, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def status(gateway: Endpoint, key: str, length: int = 20) -> int:
    """The status of the answer to a prompt of so many tokens, which has one token."""
    with client_of(gateway, key) as client:
        try:
            client.completions.create(prompt=prompt_of(900, length), max_tokens=1, **GREEDY)
        except openai.RateLimitError:
            return REFUSED
    return ADMITTED


class Running(threading.Thread):
    """A request, from when its gateway has let it in until the workers answer."""

    def __init__(self, gateway: Endpoint, key: str) -> None:
        super().__init__(daemon=True)
        self.gateway, self.key = gateway, key
        self.answer: int | openai.APIConnectionError | None = None
        running = len(gateway.ledger()["rows"])
        self.start()
        wait_until(lambda: len(gateway.ledger()["rows"]) > running, what="a running request")

    def run(self) -> None:
        try:
            self.answer = status(self.gateway, self.key)
        except openai.APIConnectionError as error:
            self.answer = error


@pytest.mark.long
def test_two_gateways_let_in_together_what_a_key_may(shared: Shared):
    two, keys = shared.gateways, shared.keys

    def statuses(key: str, number: int, length: int) -> list[int]:
        return [status(two[index % 2], key, length) for index in range(number)]

    found = shared.while_shared(lambda: statuses(next(keys.three_requests), 8, 20))
    assert found == [ADMITTED] * 3 + [REFUSED] * 5
    found = shared.while_shared(lambda: statuses(next(keys.tokens), 6, 100))
    assert found == [ADMITTED] * 2 + [REFUSED] * 4


@pytest.mark.long
def test_two_gateways_run_together_as_many_requests_as_a_key_may(shared: Shared):
    (one, other), key = shared.gateways, shared.keys.three_at_once
    shared.wait_until_shared()
    with shared.frozen_workers():
        running = [Running(gateway, key) for gateway in (one, other, one)]
        assert [status(gateway, key) for gateway in (one, other) * 2] == [REFUSED] * 4
    for each in running:
        each.join(120)
        assert each.answer == ADMITTED
    wait_until(
        lambda: status(other, key) == ADMITTED, what="room for a request, of which Redis is told after the answer"
    )


@pytest.mark.long
def test_without_redis_each_gateway_has_its_part_and_with_it_they_share_again(shared: Shared):
    (one, other), keys = shared.gateways, shared.keys

    def known() -> tuple[str, list[int]]:
        """A key of which this gateway knows that it is used up, and the answers that made it so."""
        key = next(keys.three_requests)
        return key, [status(one, key) for _ in range(4)]

    key, found = shared.while_shared(known)
    assert found == [ADMITTED] * 3 + [REFUSED]
    shared.redis.kill()
    assert [status(one, key) for _ in range(2)] == [REFUSED] * 2, "as Redis last said"
    for gateway in (one, other):
        assert [status(gateway, keys.four_requests) for _ in range(3)] == [ADMITTED, ADMITTED, REFUSED]
        assert gateway.metric("baton_limits_alone") == 1
    with shared.frozen_workers():
        running = [Running(gateway, keys.two_at_once) for gateway in (one, other)]
        assert [status(gateway, keys.two_at_once) for gateway in (one, other)] == [REFUSED] * 2
    for each in running:
        each.join(120)
        assert each.answer == ADMITTED
    shared.redis.start()

    def later() -> list[int]:
        key = next(keys.three_requests)
        return [status(gateway, key) for gateway in (one, other) * 3]

    assert shared.while_shared(later) == [ADMITTED] * 3 + [REFUSED] * 3


def test_requests_of_a_gateway_that_was_killed_run_no_longer_than_their_leases(shared: Shared):
    (victim, other), key = shared.gateways, shared.keys.of_victim
    shared.wait_until_shared()
    with shared.frozen_workers():
        running = [Running(victim, key) for _ in range(2)]
        victim.kill()
        for each in running:
            each.join(120)
            assert isinstance(each.answer, openai.APIConnectionError)
        assert status(other, key) == REFUSED, "nobody said that they ended"
    age_packed(shared.redis, f"baton:limits:{{{shared.keys.of_victim_id}}}:running", LEASE_S)
    assert [status(other, key) for _ in range(2)] == [ADMITTED] * 2
    victim.start()
