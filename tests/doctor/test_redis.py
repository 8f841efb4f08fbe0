"""Findings on a real Redis: its memory, its users, its clock, and one that is not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.doctor import redis_server
from services.doctor.finding import Finding, Level
from services.doctor.redis_access import COMMANDS, PREFIXES
from services.tls.roles import CertificateRole
from tests.doctor.findings import levels, named
from tests.redis_server import RedisServer, running_redis

ROOT = Path(__file__).parents[2]
GATEWAY, WORKER = CertificateRole.GATEWAY, CertificateRole.WORKER
PASSWORD = "a-password-of-redis"
ROOM = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis"), *ROOM) as running:
        yield running


@pytest.fixture
def settings(server: RedisServer) -> Iterator[RedisServer]:
    """The server, whose settings a test may change."""
    before = server.admin.config_get("maxmemory*")
    yield server
    for name in ("maxmemory", "maxmemory-policy"):
        server.admin.config_set(name, str(before[name]))


def user(server: RedisServer, *rules: str) -> str:
    """A new user's URL."""
    server.admin.acl_deluser("someone")
    server.admin.execute_command("ACL", "SETUSER", "someone", "on", f">{PASSWORD}", *rules)
    return f"redis://someone:{PASSWORD}@127.0.0.1:{server.port}"


def rules(role: CertificateRole, without: str = "") -> list[str]:
    """The rules of the chart for a role, less one command or prefix."""
    commands = [f"+{command}" for command in sorted(COMMANDS[role]) if command != without]
    return ["-@all", "+select", *commands, *(f"~{prefix}*" for prefix in PREFIXES[role] if prefix != without)]


async def test_a_good_server_is_fine_and_keeps_nothing_of_the_doctor(server: RedisServer) -> None:
    found = await redis_server.check_redis(server.url)
    assert levels(found) == {
        "latency": Level.OK,
        "version": Level.OK,
        "eviction": Level.OK,
        "persistence": Level.NOTE,
        "clock": Level.OK,
        "access": Level.OK,
    }
    assert server.admin.keys() == []


async def test_a_policy_by_which_a_full_server_refuses_writes_is_a_warning(settings: RedisServer) -> None:
    settings.admin.config_set("maxmemory-policy", "noeviction")
    found = named(await redis_server.check_redis(settings.url), "eviction")
    assert found.level is Level.WARNING
    assert "allkeys-lru" in str(found.advice)


async def test_a_server_without_a_limit_of_memory_is_a_warning(settings: RedisServer) -> None:
    settings.admin.config_set("maxmemory", 0)
    assert named(await redis_server.check_redis(settings.url), "eviction").level is Level.WARNING


async def test_a_server_that_takes_no_writes_is_an_error(settings: RedisServer) -> None:
    settings.admin.config_set("maxmemory-policy", "noeviction")
    settings.admin.config_set("maxmemory", 1)
    found = named(await redis_server.check_redis(settings.url), "access")
    assert found.level is Level.ERROR
    assert "maxmemory" in found.found


async def test_a_replica_is_an_error(settings: RedisServer) -> None:
    settings.admin.replicaof("127.0.0.1", "1")
    try:
        found = named(await redis_server.check_redis(settings.url), "access")
    finally:
        settings.admin.replicaof("no", "one")
    assert found.level is Level.ERROR
    assert "replica" in found.found


@pytest.mark.parametrize("role", [GATEWAY, WORKER])
async def test_the_chart_s_users_may_do_what_their_role_needs(server: RedisServer, role: CertificateRole) -> None:
    found = await redis_server.check_redis(user(server, *rules(role)))
    assert named(found, "access").level is Level.OK
    assert f"needs, and is one for a {role}" in named(found, "access").found
    assert named(found, "info").level is Level.NOTE
    assert server.admin.keys() == []


@pytest.mark.parametrize("command", sorted(COMMANDS[WORKER] - {"ping"}))
async def test_each_command_that_a_worker_s_user_lacks_is_named(server: RedisServer, command: str) -> None:
    found = named(await redis_server.check_redis(user(server, *rules(WORKER, without=command))), "access")
    assert found.level is Level.ERROR
    assert command in found.found
    server.admin.flushdb()


@pytest.mark.parametrize("command", sorted(COMMANDS[GATEWAY] - {"ping"}))
async def test_each_command_that_a_gateway_s_user_lacks_is_named(server: RedisServer, command: str) -> None:
    found = named(await redis_server.check_redis(user(server, *rules(GATEWAY, without=command))), "access")
    assert found.level is Level.ERROR
    assert command in found.found
    server.admin.flushdb()


@pytest.mark.parametrize("prefix", PREFIXES[GATEWAY])
async def test_each_beginning_of_keys_that_a_gateway_s_user_lacks_is_named(server: RedisServer, prefix: str) -> None:
    found = named(await redis_server.check_redis(user(server, *rules(GATEWAY, without=prefix))), "access")
    assert found.level is Level.ERROR


def test_the_commands_are_those_of_the_chart() -> None:
    chart = (ROOT / "helm/baton/templates/_redis.tpl").read_text()
    for role in (GATEWAY, WORKER):
        listed = re.search(rf'define "baton.redis{role.title()}Commands" -}}}}\n(.*)\n', chart)
        keys = re.search(rf"^user {role} on .*", chart, flags=re.MULTILINE)
        assert listed is not None
        assert keys is not None
        assert {word.removeprefix("+") for word in listed[1].split()} == COMMANDS[role] | {"select"}
        assert re.findall(r"~(\S+)\*", keys[0]) == list(PREFIXES[role])


@pytest.mark.parametrize("url", ["redis://someone:{0}@127.0.0.1:1", "redis://someone:{0}@127.0.0.1:{1}"])
async def test_a_server_that_is_not_there_or_refuses_is_an_error_without_the_password(
    server: RedisServer, url: str
) -> None:
    server.admin.acl_deluser("someone")
    (found,) = await redis_server.check_redis(url.format(PASSWORD, server.port))
    assert (found.name, found.level) == ("reached", Level.ERROR)
    assert PASSWORD not in str(found)


async def test_a_frozen_server_is_an_error_within_seconds(tmp_path: Path) -> None:
    with running_redis(tmp_path) as frozen:
        frozen.freeze()
        (found,) = await redis_server.check_redis(frozen.url)
    assert (found.name, found.level) == ("reached", Level.ERROR)
    assert "no answer within 2 s" in found.found


def test_old_versions_are_errors_and_valkey_is_named() -> None:
    def check(**info: str) -> Finding:
        return redis_server.check_version(info)

    assert check(redis_version="6.0.16").level is Level.ERROR
    assert check(redis_version="6.2.0").level is check(redis_version="10.1").level is Level.OK
    assert check(redis_version="7.2.4", valkey_version="8.1.0").found == "Valkey 8.1.0"


def test_a_snapshot_that_failed_is_an_error() -> None:
    assert redis_server.check_persistence({"rdb_last_bgsave_status": "err"}).level is Level.ERROR
    assert redis_server.check_persistence({"rdb_last_bgsave_status": "ok", "aof_enabled": 1}).level is Level.OK


def test_slow_round_trips_are_a_warning() -> None:
    assert redis_server.check_latency([0.001] * 99 + [0.06]).level is Level.WARNING
    assert redis_server.check_latency([0.001] * 100).level is redis_server.check_latency([0.001]).level is Level.OK
