"""How Baton talks to Redis: one client with bounded waits, the scripts, and the names of the keys.

    baton:index:{<tree>}   one tree of blocks: hash of a block -> ids of who holds it
    baton:{workers}:...    the registry (registry.py)

A tree is all the blocks below one first block, named by that block's hash. It is one key, so a lookup touches one slot
of a Redis Cluster, and a server that evicts under `maxmemory` takes a tree whole: no chain keeps a hole.
"""

from importlib import resources

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from services.protocol.block_hash import BlockHash

TREES = "baton:index:{*}"
RECORDS, LEASES, DEAD, SWEEPER = (f"baton:{{workers}}:{name}" for name in ("records", "leases", "dead", "sweeper"))

# What a call to a server that is gone, frozen or refuses can raise.
UNREACHABLE = (RedisError, OSError, TimeoutError)

_CLUSTER = "+cluster://"
_TREE_HEX = 16  # of the first block's hash; two trees that share a key take no harm

Client = Redis | RedisCluster


def tree_key(first: BlockHash) -> str:
    """The key of the tree whose first block has this hash."""
    return f"baton:index:{{{first.hex()[:_TREE_HEX]}}}"


def connect(url: str, timeout_s: float) -> Client:
    """A client for redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://; connects when it is used.

    Waits at most `timeout_s` for a connection and for an answer. A single server is asked once; a cluster's client
    goes where it is sent, and looks for the new master. Raises ValueError for a URL that is none.
    """
    if _CLUSTER in url:
        url = url.replace(_CLUSTER, "://", 1)
        return RedisCluster.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2)
    once = Retry(NoBackoff(), 0)
    return Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2, retry=once)


def script(client: Client, name: str) -> AsyncScript:
    """A script of the folder `lua`; it is loaded where the server does not have it."""
    return client.register_script(resources.files(__package__).joinpath(f"lua/{name}.lua").read_text())
