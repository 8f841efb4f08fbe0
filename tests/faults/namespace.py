"""Networks of a test's own, in which packets can be lost, and hosts that are linked. They take root on Linux."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

from tests.machine import NAMESPACES, miss, require

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
_BOOT_ID, _RDMA = "/proc/sys/kernel/random/boot_id", "/sys/class/infiniband"
_BRIDGE = "bridge"
_NO_CUT = ("table inet cut", "delete table inet cut")
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def private_network() -> Iterator[Callable[[], None]]:
    """Takes this thread, and those and the processes that it starts, into a network that has loopback alone.

    Gives a function that takes another process there. Skips the test where the kernel does not permit it.
    """
    require(NAMESPACES)
    if not shutil.which("ip"):
        miss("no ip to set up a network: apt install iproute2")
    forkserver.ensure_running()  # by now, and so outside: it outlives this network, and serves other tests too
    own = _own_network()
    with _opened(own) as before:
        _unshare(_CLONE_NEWNET)
        try:
            _ip("link set lo up")
            yield partial(_enter, own.replace("self", str(os.getpid()), 1))
        finally:
            _enter(f"/proc/self/fd/{before}")


def lay_bridge(address: str) -> None:
    """Gives this network a bridge that others can be linked to, with an address and its network: 10.0.0.1/24."""
    _ip(f"link add {_BRIDGE} type bridge")
    _ip(f"addr add {address} dev {_BRIDGE}")
    _ip(f"link set {_BRIDGE} up")


@contextlib.contextmanager
def linked_network(name: str, address: str) -> Iterator[Callable[[], None]]:
    """Makes another network, which has a link with this address to the bridge of this one. See `lay_bridge`.

    Gives a function that takes a thread or a process there. name: of the link's end at the bridge.
    """
    with _opened(_own_network()) as before, contextlib.ExitStack() as opened:
        _unshare(_CLONE_NEWNET)
        try:
            _ip("link set lo up")
            _ip(f"link add eth0 type veth peer name {name} netns {_path(before)}")
            _ip(f"addr add {address} dev eth0")
            _ip("link set eth0 up")
            made = opened.enter_context(_opened(_own_network()))
        finally:
            _enter(_path(before))
        _ip(f"link set {name} master {_BRIDGE} up")
        yield partial(_enter, _path(made))


def pose_as_another_host(boot_id: Path) -> None:
    """Shows this process, which has one thread yet, and those that it starts the kernel of another host.

    Its boot id is what the file says, and it has no ports for RDMA: these belong to all networks of a machine.
    """
    _unshare(_CLONE_NEWNS)
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    _mount(str(boot_id), _BOOT_ID, _MS_BIND)
    if os.path.exists(_RDMA):
        _mount(None, _RDMA, 0, "tmpfs")


def see_own_devices() -> None:
    """Shows this process, which has one thread yet, and those that it starts the devices of its network in /sys, where
    UCX looks for them: otherwise these are the devices of the network in which /sys was mounted.
    """
    _unshare(_CLONE_NEWNS)
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    _mount(None, "/sys", 0, "sysfs")


def num_sent(name: str) -> int:
    """Counts the bytes that went from this network's bridge to the link of that name."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        device, _, counters = line.partition(":")
        if device.strip() == name:
            return int(counters.split()[8])
    raise AssertionError(f"no link {name}")


def lose_packets(percent: int, ports: Iterable[int]) -> None:
    """Makes this network lose so many of the packets from and to these TCP ports; 0: none any more."""
    chosen = ", ".join(map(str, ports))
    rules = [f"tcp {end} {{ {chosen} }} numgen random mod 100 < {percent} counter drop" for end in ("dport", "sport")]
    lines = ["table inet loss", "delete table inet loss", "table inet loss {", "chain input {"]
    lines += ["type filter hook input priority 0", *(rules if percent else []), "}", "}"]
    _nft(lines)


def num_lost() -> int:
    """Counts the packets that were lost since `lose_packets`."""
    listed = subprocess.run(["nft", "list", "table", "inet", "loss"], stdout=subprocess.PIPE, text=True, check=True)
    return sum(map(int, re.findall(r"counter packets (\d+)", listed.stdout)))


def cut_off(network: Callable[[], None]) -> None:
    """Makes a network lose all packets from and to others. network: takes a process there."""
    chains = [
        f"chain {hook} {{\ntype filter hook {hook} priority 0\n{end} != lo drop\n}}"
        for hook, end in (("input", "iifname"), ("output", "oifname"))
    ]
    _nft([*_NO_CUT, "table inet cut {", *chains, "}"], network)


def reconnect(network: Callable[[], None]) -> None:
    """Ends what `cut_off` does, if it was called."""
    _nft(_NO_CUT, network)


def _nft(lines: Iterable[str], network: Callable[[], None] | None = None) -> None:
    assert shutil.which("nft"), "nft is missing: apt install nftables"
    text = "\n".join(lines) + "\n"
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, preexec_fn=network)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A network lives as long as a file of it is open."""
    network = os.open(path, os.O_RDONLY)
    try:
        yield network
    finally:
        os.close(network)


def _own_network() -> str:
    return f"/proc/self/task/{threading.get_native_id()}/ns/net"


def _path(network: int) -> str:
    """The path by which other processes find a file that is open here."""
    return f"/proc/{os.getpid()}/fd/{network}"


def _enter(path: str) -> None:
    with _opened(path) as network:
        _checked(_libc.setns(network, _CLONE_NEWNET), "setns")


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def _mount(source: str | None, target: str, flags: int, kind: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
