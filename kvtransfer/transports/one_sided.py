"""Whether one process can read another's memory without its help, by the means that UCX has. Linux only.

UCX says nothing when it falls back to TCP, where a read needs its source's help and a reader that dies may take its
source with it. So each process tells where it is and what may be used there, and a reader tries the one means that
can be tried: it reads a few bytes of the other process, as UCX would (`cma`, process_vm_readv), and compares them with
what they should be. What RDMA ports lead to cannot be tried from here: two active ports of one kind are believed.

A pool in device memory needs more, since its generation words stay in host memory: on one host CUDA IPC beside `cma`,
which is tried likewise (the source exports its pool, the reader maps it); between hosts, devices that give their memory
to RDMA ports (GPUDirect). Between device and host memory nothing is one-sided: CUDA IPC joins devices, `cma` hosts.
"""

import ctypes
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import ClassVar

from kvtransfer.process import boot_id
from kvtransfer.transports.base import Reach
from kvtransfer.transports.cuda_driver import IPC_HANDLE_BYTES, CudaDriver

_PROBE_BYTES = 16
_BOOT_ID_BYTES = 36
# UCX's names for a means, and for the groups that it belongs to.
_CMA_NAMES = frozenset({"all", "shm", "sm", "cma"})
_RDMA_NAMES = frozenset({"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"})
_CUDA_IPC_NAMES = frozenset({"all", "cuda", "cuda_ipc"})
_INFINIBAND = Path("/sys/class/infiniband")
_NOT_EXPORTED = bytes(IPC_HANDLE_BYTES)


class Means(IntFlag):
    """How a process may be read without its help."""

    NONE = 0
    CMA = 1  # by processes of the same user on its host
    INFINIBAND = 2
    ROCE = 4  # RDMA over Ethernet
    CUDA_IPC = 8  # its device memory, by processes of its host that can map it
    GPU_DIRECT = 16  # its device memory, by RDMA


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a process and its pool are, and what a reader may try there. 136 bytes when packed."""

    boot_id: bytes  # of the running kernel
    pid: int  # in its own namespace
    means: Means
    probe_address: int
    probe: bytes  # what is there
    device: int | None = None  # that its pool is in, as it counts them; None: host memory
    exported: bytes | None = None  # what maps that device memory elsewhere; None: there is none, or it cannot be mapped

    BODY: ClassVar = struct.Struct(f"<{_BOOT_ID_BYTES}sIIQ{_PROBE_BYTES}si{IPC_HANDLE_BYTES}s")

    def pack(self) -> bytes:
        """For a descriptor."""
        device, exported = -1 if self.device is None else self.device, self.exported or _NOT_EXPORTED
        return self.BODY.pack(self.boot_id, self.pid, self.means, self.probe_address, self.probe, device, exported)

    @classmethod
    def unpack(cls, packed: bytes) -> "Whereabouts":
        """What `pack` made."""
        boot_id, pid, means, address, probe, device, exported = cls.BODY.unpack(packed)
        return cls(
            boot_id,
            pid,
            Means(means),
            address,
            probe,
            None if device < 0 else device,
            None if exported == _NOT_EXPORTED else exported,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DevicePool:
    """This process's pool, where it is in device memory."""

    driver: CudaDriver
    device: int
    address: int


class Here:
    """This process. Keeps the bytes that others try to read."""

    def __init__(
        self, environ: Mapping[str, str], infiniband: Path = _INFINIBAND, pool: DevicePool | None = None
    ) -> None:
        """pool: None where it is in host memory."""
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
        means = usable_means(environ, infiniband)
        device, exported = None, None
        self._driver = None if pool is None else pool.driver
        if pool is not None:
            device, exported = pool.device, pool.driver.export(pool.address)
            means |= _device_means(environ, pool)
        self.whereabouts = Whereabouts(
            boot_id().encode(), os.getpid(), means, ctypes.addressof(self._probe), self._probe.raw, device, exported
        )

    def reach(self, there: Whereabouts) -> Reach:
        """How UCX would read that process from here."""
        if (there.device is None) != (self.whereabouts.device is None):
            return Reach(False, "one of the pools is in device memory, the other in host memory")
        both = self.whereabouts.means & there.means
        device = "" if self._driver is None else "device "
        why_not_here = self._why_not_cma(there) or self._why_not_cuda_ipc(there)
        if why_not_here is None:
            return Reach(True, f"its {device}memory can be read from here ({'CUDA IPC' if device else 'CMA'})")
        if both & (Means.INFINIBAND | Means.ROCE) and (not device or both & Means.GPU_DIRECT):
            return Reach(True, f"both have an active port for RDMA ({_rdma_name(both)})")
        return Reach(False, f"{why_not_here}, and they share no active port for RDMA of {device}memory")

    def _why_not_cma(self, there: Whereabouts) -> str | None:
        if there.boot_id != self.whereabouts.boot_id:
            return "it is on another host"
        if not (self.whereabouts.means & there.means & Means.CMA):
            return "UCX_TLS keeps it from reading another process's memory (CMA)"
        return _why_unreadable(there)

    def _why_not_cuda_ipc(self, there: Whereabouts) -> str | None:
        """On this host. None where the pools are in host memory too: nothing is to be read by it."""
        if self._driver is None:
            return None
        if not (self.whereabouts.means & there.means & Means.CUDA_IPC):
            return "UCX's environment keeps it from reading another process's device memory (CUDA IPC)"
        if there.exported is None:
            return "its device memory cannot be exported (CUDA IPC)"
        why_not = self._driver.why_not_readable(there.exported)
        return None if why_not is None else f"its device memory cannot be mapped here (CUDA IPC: {why_not})"


def usable_means(environ: Mapping[str, str], infiniband: Path = _INFINIBAND) -> Means:
    """What UCX may use: what there is, less what UCX_TLS and UCX_NET_DEVICES exclude."""
    transports = environ.get("UCX_TLS", "all")
    means = Means.CMA if _allows(transports, _CMA_NAMES) else Means.NONE
    if _allows(transports, _RDMA_NAMES):
        means |= _active_ports(infiniband, environ.get("UCX_NET_DEVICES", "all"))
    return means


def _device_means(environ: Mapping[str, str], pool: DevicePool) -> Means:
    # Reads may be switched off by themselves: UCX emulates them then, with the source's help.
    has_reads = environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on") == "on"
    may_use_ipc = has_reads and _allows(environ.get("UCX_TLS", "all"), _CUDA_IPC_NAMES)
    means = Means.CUDA_IPC if may_use_ipc else Means.NONE
    return means | Means.GPU_DIRECT if pool.driver.serves_rdma(pool.device) else means


def _allows(ucx_tls: str, names: frozenset[str]) -> bool:
    """UCX_TLS is a list of names, or, after a ^, of those that are excluded."""
    excludes = ucx_tls.startswith("^")
    named = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    return not (named & (names - {"all"})) if excludes else bool(named & names)


def _active_ports(infiniband: Path, net_devices: str) -> Means:
    chosen = {name.strip() for name in net_devices.split(",")}
    found = Means.NONE
    for port in infiniband.glob("*/ports/*"):
        device = port.parent.parent.name
        if not chosen & {"all", device, f"{device}:{port.name}"}:
            continue
        if "ACTIVE" in (port / "state").read_text():  # "4: ACTIVE"
            is_ethernet = (port / "link_layer").read_text().strip() == "Ethernet"
            found |= Means.ROCE if is_ethernet else Means.INFINIBAND
    return found


def _rdma_name(means: Means) -> str:
    return "InfiniBand" if means & Means.INFINIBAND else "RoCE"


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def _why_unreadable(there: Whereabouts) -> str | None:
    """Reads the probe as UCX would read blocks; None where it is what it should be."""
    libc = ctypes.CDLL(None, use_errno=True)
    arrived = ctypes.create_string_buffer(_PROBE_BYTES)
    local = _IoVec(ctypes.addressof(arrived), _PROBE_BYTES)
    remote = _IoVec(there.probe_address, _PROBE_BYTES)
    num_bytes = libc.process_vm_readv(there.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if num_bytes < 0:
        return f"its memory cannot be read from here (CMA: {os.strerror(ctypes.get_errno()).lower()})"
    if arrived.raw != there.probe:
        return "its process id means another process here (CMA)"
    return None
