"""Baton's access to Redis: one client with bounded waits, the scripts, and the names of the keys.

    baton:index:{<tree>}   one tree of blocks: hash of a block -> ids of who holds it
    baton:{workers}:...    the registry (registry.py)
    baton:response:...     responses that gateways keep (services/gateway/openai/responses)
    baton:response-lease:...   who generates one in the background lives
    baton:limits:{<key>}:  what is used of the limits of an API key (services/gateway/keys)
    baton:limits:gateways  which gateways share them

A tree is all the blocks below one first block, named by that block's hash. It is one key, so a lookup touches one hash
slot of a Redis Cluster, and a server that evicts under `maxmemory` takes a tree whole: no chain keeps a hole.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from services.prefix_index.redis_tls import LOWEST_VERSION, use_fresh_connections, use_fresh_connections_of_cluster
from services.protocol.block_hash import BlockHash

TREES = "baton:index:{*}"
RECORDS, LEASES, DEAD, SWEEPER = (f"baton:{{workers}}:{name}" for name in ("records", "leases", "dead", "sweeper"))

# What a call to a server that is gone, frozen or refuses can raise.
UNREACHABLE = (RedisError, RedisClusterException, OSError, TimeoutError)

_TLS = "rediss"
_CLUSTER = "+cluster://"
_MAX_CONNECTIONS = 16  # to a single server; further calls wait for one
_TREE_HEX = 16  # of the first block's hash; two trees that share a key take no harm

ScriptCall = tuple[list[str], Sequence[bytes | str | int]]  # keys, arguments

T = TypeVar("T")


class CallFailed(RedisError):
    """A call failed in a way that the library does not foresee. It is one of UNREACHABLE."""


class Client:
    """One Redis server or cluster, and how long to wait for it."""

    def __init__(self, redis: Redis | RedisCluster, timeout_s: float) -> None:
        self.redis = redis
        self._timeout_s = timeout_s

    def script(self, name: str, beginning: str = "") -> "Script":
        """A script of the folder `lua`; it is loaded where the server does not have it.

        beginning: another one there, whose functions it calls; empty: none.
        """
        folder = resources.files(__package__).joinpath("lua")
        source = "".join(folder.joinpath(f"{part}.lua").read_text() for part in (beginning, name) if part)
        return Script(self.redis.register_script(source), self)

    async def within_limit(self, call: Awaitable[T]) -> T:
        """The call's answer. Raises one of UNREACHABLE, after at most the client's timeout, connecting included.

        Whatever else the library raises, as where a connection breaks in an unlucky moment, is a CallFailed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
        except UNREACHABLE:
            raise
        except Exception as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Closes its connections; one to a server that does not answer is left to the system."""
        with suppress(*UNREACHABLE):
            await self.within_limit(self.redis.aclose())


class Script:
    """A script on the server."""

    def __init__(self, call: AsyncScript, client: Client) -> None:
        self._call = call
        self._client = client

    async def __call__(self, keys: list[str], arguments: Sequence[bytes | str | int] = ()) -> Any:
        """Runs it. Raises one of UNREACHABLE, as `within_limit` does."""
        return await self._client.within_limit(self._call(keys, arguments))

    async def each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs it for each call; an error of the server's stands in the place of its call's answer.

        One round trip, where there is one server. Raises as `within_limit` does where that fails as a whole.
        """
        return await self._client.within_limit(self._each(calls))

    async def _each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        redis = self._client.redis
        if isinstance(redis, RedisCluster):  # whose pipelines cannot load a script
            return await asyncio.gather(*(self._call(*call) for call in calls), return_exceptions=True)
        answers = await self._pipelined(redis, calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await redis.script_load(self._call.script)
            answers = await self._pipelined(redis, calls)
        return answers

    async def _pipelined(self, redis: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
        pipeline = redis.pipeline(transaction=False)
        for keys, arguments in calls:
            pipeline.evalsha(self._call.sha, len(keys), *keys, *arguments)
        return await pipeline.execute(raise_on_error=False)


def is_of_another_type(error: BaseException) -> bool:
    """True when the server answered, and a key's value is not of the type that Baton writes there."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def tree_key(first: BlockHash) -> str:
    """The key of the tree whose first block has this hash."""
    return f"baton:index:{{{first.hex()[:_TREE_HEX]}}}"


def connect(url: str, timeout_s: float) -> Client:
    """A client for redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://; connects when it is used.

    A single server is asked once; a cluster's client goes where it is sent, and looks for the new master. Raises
    ValueError for a URL that is none.
    """
    # On Python 3.11 the library's own limit for a send, asyncio.wait_for, loses cancellations; it also makes tasks.
    options: Any = {"socket_timeout": None, "socket_connect_timeout": timeout_s, "protocol": 2}
    if url.startswith(_TLS):
        options["ssl_min_version"] = LOWEST_VERSION
    if _CLUSTER in url:
        cluster = RedisCluster.from_url(url.replace(_CLUSTER, "://", 1), **options)
        use_fresh_connections_of_cluster(cluster)
        return Client(cluster, timeout_s)
    options |= {"retry": Retry(NoBackoff(), 0), "max_connections": _MAX_CONNECTIONS, "timeout": None}
    pool = BlockingConnectionPool.from_url(url, **options)
    use_fresh_connections(pool)
    return Client(Redis.from_pool(pool), timeout_s)
