"""A real Redis server of one's own, which can be killed, frozen and emptied."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from loadtest.processes import free_ports
from services.prefix_index.embedded import server_command
from tests.machine import FAKETIME, faketime_library, require

_SLOTS = 16384


def _free_port() -> int:
    """A port that is free, and so is the one 10,000 above, which a cluster's node takes as well."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 10_000)):
            return port


class FakeClock:
    """A wall clock for processes that are started under it, which can be set while they run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset_s = 0.0
        self.step(0)

    def step(self, seconds: float) -> None:
        """Sets the clock forth, or back where `seconds` is below 0."""
        self._offset_s += seconds
        written = self._file.with_suffix(".new")
        written.write_text(f"{self._offset_s:+f}")
        written.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that is to live by this clock; timeouts of its system calls stay real."""
        require(FAKETIME)
        return {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


class RedisServer:
    """A `redis-server` on loopback without persistence. clock: that by which it lives; None: the machine's."""

    def __init__(self, directory: Path, *options: str, clock: FakeClock | None = None) -> None:
        self.port = _free_port()
        self._directory = directory
        self._options = options
        self._environment = {**os.environ, **({} if clock is None else clock.environment)}
        self.admin = redis.Redis(port=self.port)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, or starts it again, empty."""
        command = [*server_command(""), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--dir", str(self._directory), *self._options]
        self.process = subprocess.Popen(command, env=self._environment)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(redis.ConnectionError):
                self.admin.ping()
                return
            assert self.process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self.thaw()
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def num_calls(self, command: str) -> int:
        """How often clients and scripts called it so far."""
        return int(self.admin.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


# The moments, in us, that Baton's scripts keep by name in one value, of which the server's own clock says what is past.
_AGE = """
local found = cmsgpack.unpack(redis.call('GET', KEYS[1]))
for name, ends in pairs(found) do
  found[name] = ends - ARGV[1] * 1000000
end
redis.call('SET', KEYS[1], cmsgpack.pack(found), 'KEEPTTL')
"""


def age_packed(server: RedisServer, key: str, seconds: float) -> None:
    """Lets so much time pass for what the value of a key says of leases."""
    server.admin.eval(_AGE, 1, key, seconds)


# The times, in us, of what is used of limits: of buckets as text, of leases by name in one value.
_STEP_LIMITS = """
local by, kept = ARGV[1] * 1000000, redis.call('GET', KEYS[1])
if tonumber(kept) then
  local moment, rest = string.match(kept, '^(%d+)(.*)$')
  kept = string.format('%.0f', moment + by) .. rest
elseif kept ~= 'counted' and kept ~= 'settled' then
  local found = cmsgpack.unpack(kept)
  for name, ends in pairs(found) do
    found[name] = ends + by
  end
  kept = cmsgpack.pack(found)
end
redis.call('SET', KEYS[1], kept, 'KEEPTTL')
"""


def step_limits(server: RedisServer, seconds: float) -> None:
    """Sets all times that Redis keeps of limits later by so much, or earlier where it is below 0."""
    for key in server.admin.keys("baton:limits:*"):
        server.admin.eval(_STEP_LIMITS, 1, key, seconds)


_STEP_LEASES = """
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  redis.call('ZINCRBY', KEYS[1], ARGV[1] * 1000, id)
end
"""


def step_leases(server: RedisServer, key: str, seconds: float) -> None:
    """Lets all leases of a sorted set, in ms, end later by so much, or earlier where it is below 0."""
    server.admin.eval(_STEP_LEASES, 1, key, seconds)


@contextlib.contextmanager
def running_redis(directory: Path, *options: str, clock: FakeClock | None = None) -> Iterator[RedisServer]:
    """A server for the life of the context. clock: as RedisServer's."""
    server = RedisServer(directory, *options, clock=clock)
    try:
        yield server
    finally:
        server.admin.close()
        server.kill()


@contextlib.contextmanager
def running_cluster(directory: Path) -> Iterator[RedisServer]:
    """A Redis Cluster of one node that holds every slot."""
    with running_redis(directory, "--cluster-enabled", "yes") as server:
        server.admin.execute_command("CLUSTER ADDSLOTS", *range(_SLOTS))
        while server.admin.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            time.sleep(0.02)
        yield server
