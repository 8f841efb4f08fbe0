"""What listens in the network of this thread, whichever process it belongs to, as the kernel lists it."""

import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # TCP_LISTEN, and TCP_CLOSE for UDP without a peer
_HEAD_LINES = 1


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A port that is open for others."""

    protocol: str  # tcp or udp
    host: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """True where other hosts cannot come."""
        return ipaddress.ip_address(self.host).is_loopback


def listeners() -> set[Listener]:
    """Lists all of them."""
    found = set()
    for table, listens in _LISTENS.items():
        for line in Path("/proc/thread-self/net", table).read_text().splitlines()[_HEAD_LINES:]:
            _, local, _, state, *_ = line.split()
            if state == listens:
                address, _, port = local.rpartition(":")
                found.add(Listener(table[:3], _host(address), int(port, 16)))
    return found


def _host(packed: str) -> str:
    """Unpacks an address: words of 32 bits, each in this machine's order of bytes. IPv4 within IPv6 becomes IPv4."""
    words = (int(packed[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(packed), 8))
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
