"""A check that one process can read another's memory without its help, by the means that UCX has. Linux only.

UCX says nothing when it falls back to TCP, where a read needs its source's help and a reader that dies may take its
source with it. So each process tells its host and the means that may be used there, and a reader tries the one means
that can be tried: it reads a few bytes of the other process, as UCX would (`cma`, process_vm_readv), and compares them
with the bytes that the other process told. Both must be in one network as well, by whose loopback UCX connects before.
RDMA cannot be tried here: two active ports of one kind count as connected.

A pool in device memory needs two means, since its generation words stay in host memory. On one host these are `cma` and
CUDA IPC, which is tried likewise: the source exports its pool, the reader maps it. Between hosts they are RDMA ports
and devices that give their memory to those ports (GPUDirect). Reads between device and host memory are never one-sided:
CUDA IPC reads from device to device, `cma` from host memory to host memory.
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
from kvtransfer.transports import ucx
from kvtransfer.transports.base import Reach
from kvtransfer.transports.cuda_driver import IPC_HANDLE_BYTES, CudaDriver
from kvtransfer.transports.ucx import NET_DEVICES, ROOT, TRANSPORTS, active_ports

_PROBE_BYTES = 16
_BOOT_ID_BYTES = 36
# UCX's names for a means, and for the groups that contain it.
_CMA_NAMES = frozenset({"all", "shm", "sm", "cma"})
_RDMA_NAMES = frozenset({"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"})
_CUDA_IPC_NAMES = frozenset({"all", "cuda", "cuda_ipc"})
_NOT_EXPORTED = bytes(IPC_HANDLE_BYTES)


class Means(IntFlag):
    """Means by which a process may be read without its help."""

    NONE = 0
    CMA = 1  # its host memory, by processes of the same user on its host
    INFINIBAND = 2
    ROCE = 4  # RDMA over Ethernet
    CUDA_IPC = 8  # its device memory, by processes of its host that can map it
    GPU_DIRECT = 16  # its device memory, by RDMA


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The place of a process and its pool, and the means that a reader may try there. 136 bytes when packed."""

    boot_id: bytes  # of the running kernel
    pid: int  # in the namespace of the process
    means: Means
    probe_address: int
    probe: bytes  # the bytes at `probe_address`
    device: int | None = None  # of the pool, as the process counts devices; None: host memory
    exported: bytes | None = None  # CUDA IPC handle of the pool; None: in host memory, or it cannot be exported

    BODY: ClassVar = struct.Struct(f"<{_BOOT_ID_BYTES}sIIQ{_PROBE_BYTES}si{IPC_HANDLE_BYTES}s")

    def pack(self) -> bytes:
        """Packs this for a descriptor."""
        device, exported = -1 if self.device is None else self.device, self.exported or _NOT_EXPORTED
        return self.BODY.pack(self.boot_id, self.pid, self.means, self.probe_address, self.probe, device, exported)

    @classmethod
    def unpack(cls, packed: bytes) -> "Whereabouts":
        """Reads what `pack` made."""
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
    """The pool of this process, when it is in device memory."""

    driver: CudaDriver
    device: int
    address: int


class Here:
    """This process. Keeps the probe: the bytes that other processes try to read."""

    def __init__(self, environ: Mapping[str, str], root: Path = ROOT, pool: DevicePool | None = None) -> None:
        """Finds the means of this process. root: where /sys and /dev are; pool: None where it is in host memory."""
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
        means = usable_means(environ, root)
        self._has_network = ucx.has_network(environ, root)
        device, exported = None, None
        self._driver = None if pool is None else pool.driver
        if pool is not None:
            device, exported = pool.device, pool.driver.export(pool.address)
            means |= _device_means(environ, pool)
        self.whereabouts = Whereabouts(
            boot_id().encode(), os.getpid(), means, ctypes.addressof(self._probe), self._probe.raw, device, exported
        )

    def reach(self, there: Whereabouts) -> Reach:
        """Tells how UCX would read that process from here."""
        if (there.device is None) != (self.whereabouts.device is None):
            return Reach(False, "one of the pools is in device memory, the other in host memory")
        both = self.whereabouts.means & there.means
        device = "" if self._driver is None else "device "
        why_not_here = self._why_not_cma(there) or self._why_not_cuda_ipc(there)
        if why_not_here is None:
            return Reach(True, f"its {device}memory can be read from here ({'CUDA IPC' if device else 'CMA'})")
        if both & (Means.INFINIBAND | Means.ROCE) and (not device or both & Means.GPU_DIRECT):
            return Reach(True, f"both have an active port for RDMA ({_rdma_name(both)})")
        why = f"{why_not_here}, and they share no active port for RDMA of {device}memory"
        if self._connects(there):
            return Reach(False, why)
        return Reach(False, f"{why}; UCX_NET_DEVICES names no other network", possible=False)

    def _connects(self, there: Whereabouts) -> bool:
        """Tells whether UCX's TCP may get from here to there, by loopback or by a network."""
        same_host = there.boot_id == self.whereabouts.boot_id and _is_in_this_network(there.pid)
        return same_host or self._has_network

    def _why_not_cma(self, there: Whereabouts) -> str | None:
        if there.boot_id != self.whereabouts.boot_id:
            return "it is on another host"
        if not (self.whereabouts.means & there.means & Means.CMA):
            return "UCX_TLS keeps it from reading another process's memory (CMA)"
        return _why_unreadable(there)

    def _why_not_cuda_ipc(self, there: Whereabouts) -> str | None:
        """Tells why CUDA IPC cannot read a pool on this host; None where it can, or where both are in host memory."""
        if self._driver is None:
            return None
        if not (self.whereabouts.means & there.means & Means.CUDA_IPC):
            return "UCX's environment keeps it from reading another process's device memory (CUDA IPC)"
        if there.exported is None:
            return "its device memory cannot be exported (CUDA IPC)"
        why_not = self._driver.why_not_readable(there.exported)
        return None if why_not is None else f"its device memory cannot be mapped here (CUDA IPC: {why_not})"


def usable_means(environ: Mapping[str, str], root: Path = ROOT) -> Means:
    """Finds the means that UCX may use: those of this host, less those that UCX_TLS and UCX_NET_DEVICES exclude."""
    transports = environ.get(TRANSPORTS, "all")
    means = Means.CMA if _allows(transports, _CMA_NAMES) else Means.NONE
    if _allows(transports, _RDMA_NAMES):
        means |= _rdma_means(root, environ.get(NET_DEVICES, "all"))
    return means


def _device_means(environ: Mapping[str, str], pool: DevicePool) -> Means:
    # This variable switches off reads alone: UCX then emulates them with the source's help.
    has_reads = environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on") == "on"
    may_use_ipc = has_reads and _allows(environ.get(TRANSPORTS, "all"), _CUDA_IPC_NAMES)
    means = Means.CUDA_IPC if may_use_ipc else Means.NONE
    return means | Means.GPU_DIRECT if pool.driver.serves_rdma(pool.device) else means


def _allows(ucx_tls: str, names: frozenset[str]) -> bool:
    """True where UCX_TLS allows one of `names`. It lists allowed names or, after a ^, excluded ones."""
    excludes = ucx_tls.startswith("^")
    named = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    return not (named & (names - {"all"})) if excludes else bool(named & names)


def _rdma_means(root: Path, net_devices: str) -> Means:
    chosen = {name.strip() for name in net_devices.split(",")}
    found = Means.NONE
    for port in active_ports(root):
        if chosen & {"all", port.device, port.name}:
            found |= Means.ROCE if port.is_ethernet else Means.INFINIBAND
    return found


def _rdma_name(means: Means) -> str:
    return "InfiniBand" if means & Means.INFINIBAND else "RoCE"


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def _why_unreadable(there: Whereabouts) -> str | None:
    """Reads the probe as UCX would read blocks; tells why that fails, None where the bytes are as told."""
    libc = ctypes.CDLL(None, use_errno=True)
    arrived = ctypes.create_string_buffer(_PROBE_BYTES)
    local = _IoVec(ctypes.addressof(arrived), _PROBE_BYTES)
    remote = _IoVec(there.probe_address, _PROBE_BYTES)
    num_bytes = libc.process_vm_readv(there.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if num_bytes < 0:
        return f"its memory cannot be read from here (CMA: {os.strerror(ctypes.get_errno()).lower()})"
    if arrived.raw != there.probe:
        return "its process id means another process here (CMA)"
    if not _is_in_this_network(there.pid):
        return "it is in another network of this host, and UCX connects by its loopback before it reads (CMA)"
    return None


def _is_in_this_network(pid: int) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net")
    except OSError:  # it ended, or is hidden
        return False
