"""The sockets at which a process and its children can be reached, as the kernel has them in /proc. Linux alone."""

import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_LISTENS, _ACCEPTS, _DATAGRAM = "0A", 0x10000, "0002"  # a TCP state; a flag and a type of Unix sockets
_INTERNET = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Socket(NamedTuple):
    """A socket that takes connections, or datagrams, as the kernel lists it."""

    kind: str  # tcp, udp, ...
    address: str
    port: int
    inode: str


@dataclass(frozen=True)
class Listener:
    """A socket that takes connections, or datagrams. process: the last of the tree's that has it: a parent may, too."""

    process: psutil.Process
    kind: str  # tcp, udp, unix, ...
    address: str  # an IP address, or the path of a Unix socket; @ begins one in the abstract namespace
    port: int = 0

    @property
    def command(self) -> list[str]:
        """The command line of its process."""
        return self.process.cmdline()


def is_own_port_of_worker(listener: Listener) -> bool:
    """True for the port that a worker of `baton up` was told to listen at."""
    words = listener.command
    return bool({"prefill", "decode"} & set(words)) and words[words.index("--port") + 1] == str(listener.port)


def listeners_of(pid: int) -> list[Listener]:
    """Finds those of a process and of all below it."""
    root = psutil.Process(pid)
    owners: dict[str, psutil.Process] = {}
    for process in [root, *root.children(recursive=True)]:
        owners |= dict.fromkeys(_inodes(process.pid), process)
    network = Path(f"/proc/{pid}/net")
    found = [each for each in sockets_of(network) if each.inode in owners]
    internet = [Listener(owners[each.inode], each.kind, each.address, each.port) for each in found]
    return [*internet, *_unix(network, owners)]


def _inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = _SOCKET.fullmatch(os.readlink(entry))
        except FileNotFoundError:  # closed just now
            continue
        if found is not None:
            yield found[1]


def sockets_of(network: Path) -> Iterator[Socket]:
    """Finds those of the internet's protocols in a network, such as /proc/PID/net, whichever process has them."""
    for kind in _INTERNET:
        for line in _lines(network / kind):
            _, local, remote, state, *_ = fields = line.split()
            listens = state == _LISTENS if kind.startswith("tcp") else not int(remote.partition(":")[0], 16)
            if listens:
                host, _, port = local.partition(":")
                yield Socket(kind.removesuffix("6"), _address(host), int(port, 16), fields[9])


def _address(words: str) -> str:
    """An address of /proc/net, which has its words of 32 bits in the machine's order."""
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _unix(network: Path, owners: dict[str, psutil.Process]) -> Iterator[Listener]:
    for line in _lines(network / "unix"):
        _, _, _, flags, kind, _, inode, *path = line.split(maxsplit=7)
        if inode in owners and path and (int(flags, 16) & _ACCEPTS or kind == _DATAGRAM):
            yield Listener(owners[inode], "unix", path[0])


def _lines(table: Path) -> list[str]:
    """Those of a kernel that has such sockets."""
    return table.read_text().splitlines()[1:] if table.exists() else []
