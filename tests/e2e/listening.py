"""The sockets at which a process and its children can be reached, as the kernel has them in /proc. Linux alone."""

import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTENS, _ACCEPTS, _DATAGRAM = "0A", 0x10000, "0002"  # a TCP state; a flag and a type of Unix sockets
_INTERNET = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


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
    return [*_internet(network, owners), *_unix(network, owners)]


def _inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = _SOCKET.fullmatch(os.readlink(entry))
        except FileNotFoundError:  # closed just now
            continue
        if found is not None:
            yield found[1]


def _internet(network: Path, owners: dict[str, psutil.Process]) -> Iterator[Listener]:
    for kind in _INTERNET:
        for line in _lines(network / kind):
            _, local, remote, state, *_ = fields = line.split()
            listens = state == _LISTENS if kind.startswith("tcp") else not int(remote.partition(":")[0], 16)
            if listens and fields[9] in owners:
                host, _, port = local.partition(":")
                yield Listener(owners[fields[9]], kind.removesuffix("6"), _address(host), int(port, 16))


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
