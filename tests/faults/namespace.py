"""A network of a test's own, in which packets can be lost. It takes root on Linux, and nft."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def private_network() -> Iterator[Callable[[], None]]:
    """Takes this thread, and those and the processes that it starts, into a network that has loopback alone.

    Gives a function that takes another process there. Skips the test where the kernel does not permit it; where it
    does, a missing program is an error.
    """
    own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    before = os.open(own, os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            for program in ("ip", "nft"):
                assert shutil.which(program), f"{program} is missing: apt install iproute2 nftables"
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield partial(_enter, own.replace("self", str(os.getpid()), 1))
        finally:
            assert _libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)


def lose_packets(percent: int, ports: Iterable[int]) -> None:
    """Has this network lose so many of the packets from and to these TCP ports; 0: none any more."""
    chosen = ", ".join(map(str, ports))
    rules = [f"tcp {end} {{ {chosen} }} numgen random mod 100 < {percent} counter drop" for end in ("dport", "sport")]
    lines = ["table inet loss", "delete table inet loss", "table inet loss {", "chain input {"]
    lines += ["type filter hook input priority 0", *(rules if percent else []), "}", "}"]
    subprocess.run(["nft", "-f", "-"], input="\n".join(lines) + "\n", text=True, check=True)


def num_lost() -> int:
    """Counts the packets that were lost since `lose_packets`."""
    listed = subprocess.run(["nft", "list", "table", "inet", "loss"], stdout=subprocess.PIPE, text=True, check=True)
    return sum(map(int, re.findall(r"counter packets (\d+)", listed.stdout)))


def _enter(path: str) -> None:
    network = os.open(path, os.O_RDONLY)
    if _libc.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
