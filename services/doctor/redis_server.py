"""Redis or Valkey: reached or not, how fast, of which version, what it does when its memory is full, its clock."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import RedisCluster
from redis.exceptions import ResponseError

from services.doctor.clock import check_clock
from services.doctor.finding import Finding, error, note, ok, warning
from services.doctor.redis_access import check_access
from services.gateway.keys.redis_quotas import TIMEOUT_S as QUOTA_TIMEOUT_S
from services.prefix_index.redis_client import UNREACHABLE, Client, connect

LOWEST_VERSION = (6, 2)

_TIMEOUT_S = 2.0
_NUM_PINGS = 100
_GOOD_POLICIES = ("allkeys-lru", "allkeys-lfu")


async def check_redis(url: str) -> list[Finding]:
    """Looks at the server of a URL, as it is for the URL's user. Its password is in no finding."""
    client = connect(url, _TIMEOUT_S)
    try:
        await client.within_limit(client.redis.ping())
        return await _look(client)
    except UNREACHABLE as reason:
        return [error("reached", f"{place_of(url)}: {_words(reason)}", "look at the URL, the network and the server")]
    finally:
        await client.aclose()


def place_of(url: str) -> str:
    """Returns where a URL leads, without user and password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path


def _words(reason: BaseException) -> str:
    return str(reason) or type(reason).__name__


async def _look(client: Client) -> list[Finding]:
    latency = check_latency(await _measure(client))
    if isinstance(client.redis, RedisCluster):
        return [latency, note("cluster", "versions, memory and access of its nodes are not checked")]
    return [latency, *await _server(client), await _clock(client), *await check_access(client)]


async def _measure(client: Client) -> list[float]:
    """Returns the seconds that each of some PINGs took, one after the other."""
    times = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        await client.within_limit(client.redis.ping())
        times.append(time.perf_counter() - start)
        if sum(times) > _TIMEOUT_S:
            break
    return times


def check_latency(times: Sequence[float]) -> Finding:
    """Judges round trips, of which there is at least one, in seconds."""
    ranked = sorted(times)
    median, slow = ranked[len(ranked) // 2], ranked[min(len(ranked) * 99 // 100, len(ranked) - 1)]
    found = f"PING takes {median * 1e3:.2f} ms (p50), {slow * 1e3:.2f} ms (p99)"
    finding = ok("latency", found)
    if slow > QUOTA_TIMEOUT_S:
        finding = warning(
            "latency", found, f"above {QUOTA_TIMEOUT_S * 1e3:g} ms gateways decide alone: bring Redis nearer"
        )
    return replace(finding, figures={"p50_ms": median * 1e3, "p99_ms": slow * 1e3})


async def _server(client: Client) -> list[Finding]:
    try:
        info: Mapping[str, Any] = await client.within_limit(client.redis.info())
    except ResponseError:
        return [note("info", "not for this user, as for those of the chart: version and memory are not checked")]
    return [check_version(info), check_eviction(info), check_persistence(info)]


def check_version(info: Mapping[str, Any]) -> Finding:
    """Judges the version. info: as INFO has it; Valkey tells the version of Redis that it is like."""
    version = str(info["redis_version"])
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < LOWEST_VERSION:
        return error("version", name, f"Baton needs {'.'.join(map(str, LOWEST_VERSION))} or later")
    return ok("version", name)


def check_eviction(info: Mapping[str, Any]) -> Finding:
    """Judges what the server does when its memory is full. info: as INFO has it."""
    policy, limit = str(info.get("maxmemory_policy")), int(info.get("maxmemory", 0))
    found = f"maxmemory-policy {policy}, maxmemory {f'{limit / (1 << 20):,.0f} MiB' if limit else 'not set'}"
    if policy not in _GOOD_POLICIES:
        return warning("eviction", found, f"a full server takes no writes: set maxmemory-policy {_GOOD_POLICIES[0]}")
    if not limit:
        return warning("eviction", found, "it grows until the system ends it: set maxmemory")
    return ok("eviction", found)


def check_persistence(info: Mapping[str, Any]) -> Finding:
    """Tells what a restart of the server leaves. info: as INFO has it."""
    if info.get("rdb_last_bgsave_status") == "err":
        return error("persistence", "its last snapshot failed, so it may refuse writes", "look at its disk and its log")
    if info.get("aof_enabled"):
        return ok("persistence", "it writes an append-only file: kept responses outlive its restart")
    return note("persistence", "a restart may lose kept responses; workers publish all else again")


async def _clock(client: Client) -> Finding:
    before = time.time()
    try:
        seconds, microseconds = await client.within_limit(client.redis.time())
    except ResponseError:
        return note("clock", "this user may not ask TIME")
    told = seconds + microseconds / 1e6
    return check_clock((told, told), (before, time.time()))
