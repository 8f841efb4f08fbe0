"""The settings of UCX, which is below NIXL, where nobody chose them: it opens no port that reads of KV have no use for.

Left alone, UCX listens at a TCP port of every interface, and whoever connects there can write to any memory of the
process: a message of its protocol names the address, and nothing else is asked for. Reads are by CMA, CUDA IPC or RDMA.
For the first two UCX needs TCP between processes of one host, to notice the end of one; for RDMA it needs none. So TCP
is kept to loopback.

It also makes a datagram socket for each kind of shared memory (`mm`), in the abstract namespace, where any user may
send. NIXL asks for connections whose other end is seen to fail, which shared memory does not have: these are not used.

At SIGHUP UCX would begin to log all that it does, for good. That signal drains a worker.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
NET_DEVICES, TRANSPORTS, DEBUG_SIGNAL = "UCX_NET_DEVICES", "UCX_TLS", "UCX_DEBUG_SIGNO"
_LOOPBACK = "lo"


class RdmaPort(NamedTuple):
    """An active port for RDMA that this process may use."""

    device: str
    number: str
    is_ethernet: bool

    @property
    def name(self) -> str:
        """UCX's name for it."""
        return f"{self.device}:{self.number}"


def settings(environ: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Returns the variables to add to the environment before NIXL is set up. What is in it already stays."""
    devices = [_LOOPBACK, *(port.name for port in active_ports(root))]
    ours = {NET_DEVICES: ",".join(devices), TRANSPORTS: "^mm", DEBUG_SIGNAL: "0"}
    return {name: value for name, value in ours.items() if name not in environ}


def has_network(environ: Mapping[str, str], root: Path = ROOT) -> bool:
    """Tells whether UCX may use a network other than loopback over TCP: its variable names one, or is not set."""
    rdma = {name for port in active_ports(root) for name in (port.device, port.name)}
    return bool({name.strip() for name in environ.get(NET_DEVICES, "all").split(",")} - rdma - {_LOOPBACK})


def active_ports(root: Path = ROOT) -> Iterator[RdmaPort]:
    """Yields the active ports for RDMA, InfiniBand's and Ethernet's (RoCE). root: where /sys and /dev are.

    A container sees all ports of its host, and may use those whose device it was given.
    """
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        device = port.parent.parent
        given = any(
            _may_open(root / "dev/infiniband" / verbs.name) for verbs in device.glob("device/infiniband_verbs/*")
        )
        if given and "ACTIVE" in (port / "state").read_text():  # "4: ACTIVE"
            is_ethernet = (port / "link_layer").read_text().strip() == "Ethernet"
            yield RdmaPort(device.name, port.name, is_ethernet)


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)
