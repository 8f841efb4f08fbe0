"""Rights of the user of a Redis URL, found by trying each command that Baton sends, on a key that lives for a minute.

The key has a text. Commands for other types fail on it, which comes after the server's question whether the user may
send them: so nothing is changed by any of them.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence

from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from services.doctor.finding import Finding, error, ok
from services.prefix_index.redis_client import Client
from services.tls.roles import CertificateRole

# By role of the process, as the users of the chart's Redis have it (helm/baton/templates/_redis.tpl). SELECT is sent
# only where a URL names a database.
_OF_BOTH = frozenset(["ping", "evalsha", "script|load", "time", "hget", "zrangebyscore", "set", "del"])
COMMANDS: Mapping[CertificateRole, frozenset[str]] = {
    CertificateRole.GATEWAY: _OF_BOTH | {"get", "exists", "pexpire"},
    CertificateRole.WORKER: _OF_BOTH
    | {"hset", "hdel", "hscan", "zadd", "zrem", "zscore", "sadd", "srem", "smembers", "scan", "expire"},
}
PREFIXES: Mapping[CertificateRole, tuple[str, ...]] = {
    CertificateRole.GATEWAY: (
        "baton:index:",
        "baton:{workers}:",
        "baton:response:",
        "baton:response-lease:",
        "baton:limits:",
    ),
    CertificateRole.WORKER: ("baton:index:", "baton:{workers}:"),
}

_SCRIPT = "return 1"
_NO_SCRIPT = "0" * 40  # no script has this digest
_LIFETIME_MS = 60_000  # longer than all of this may take


async def check_access(client: Client) -> list[Finding]:
    """Tries the commands and the beginnings of keys that Baton needs. Raises one of redis_client.UNREACHABLE."""
    name = f"doctor-{secrets.token_hex(8)}"
    try:
        refused = await _refused_prefixes(client, name) | await _refused_commands(client, f"baton:index:{name}")
    except ReadOnlyError:
        return [error("access", "the server is a replica and takes no writes", "name the master")]
    except ResponseError as reason:
        return [error("access", f"the server takes no writes: {reason}", "look at its memory, its disk and its log")]
    return [describe(refused)]


def describe(refused: Iterable[str]) -> Finding:
    """Tells for which role this user will do. refused: commands and beginnings of keys that it may not use."""
    lacking = {role: sorted(set(refused) & {*COMMANDS[role], *PREFIXES[role]}) for role in COMMANDS}
    able = [role for role, missing in lacking.items() if not missing]
    if len(able) == len(lacking):
        return ok("access", "this user may send all that gateways and workers need")
    if able:
        return ok("access", f"this user may send all that a {able[0]} needs, and is one for a {able[0]} alone")
    role, missing = min(lacking.items(), key=lambda each: len(each[1]))
    return error("access", f"this user may not use {', '.join(missing)}", f"allow it by ACL SETUSER, for a {role}")


async def _refused_prefixes(client: Client, name: str) -> set[str]:
    refused = set()
    for prefix in dict.fromkeys(prefix for prefixes in PREFIXES.values() for prefix in prefixes):
        # XX: only a key that is there is set, and none of this name is.
        if not await _may(client, "SET", prefix + name, "", "XX"):
            refused.add(prefix)
    return refused


async def _refused_commands(client: Client, key: str) -> set[str]:
    wanted = set().union(*COMMANDS.values())
    if not await _may(client, "SET", key, "", "PX", _LIFETIME_MS):
        return {"set"}  # without a text at the key, others would write
    refused = {command for command, rest in _attempts(key).items() if not await _may(client, *rest)}
    return (refused | (set() if await _may(client, "DEL", key) else {"del"})) & wanted


def _attempts(key: str) -> dict[str, Sequence[str | int]]:
    """Returns the commands but SET and DEL, with arguments, by their names in access lists."""
    return {
        "ping": ["PING"],
        "time": ["TIME"],
        "script|load": ["SCRIPT LOAD", _SCRIPT],
        "evalsha": ["EVALSHA", _NO_SCRIPT, 0],
        "scan": ["SCAN", 0, "COUNT", 1],
        "get": ["GET", key],
        "exists": ["EXISTS", key],
        "expire": ["EXPIRE", key, _LIFETIME_MS // 1000],
        "pexpire": ["PEXPIRE", key, _LIFETIME_MS],
        "hget": ["HGET", key, "x"],
        "hset": ["HSET", key, "x", ""],
        "hdel": ["HDEL", key, "x"],
        "hscan": ["HSCAN", key, 0],
        "zadd": ["ZADD", key, 0, "x"],
        "zrem": ["ZREM", key, "x"],
        "zscore": ["ZSCORE", key, "x"],
        "zrangebyscore": ["ZRANGEBYSCORE", key, 0, 1],
        "sadd": ["SADD", key, "x"],
        "srem": ["SREM", key, "x"],
        "smembers": ["SMEMBERS", key],
    }


async def _may(client: Client, *command: str | int) -> bool:
    """Sends a command; tells whether the user may. Raises ResponseError where the server takes no writes."""
    try:
        await client.within_limit(client.redis.execute_command(*command))
    except NoPermissionError:
        return False
    except ResponseError as reason:
        if isinstance(reason, ReadOnlyError | OutOfMemoryError) or str(reason).startswith("MISCONF"):
            raise
    return True  # also where the key has another type, or there is no such script
