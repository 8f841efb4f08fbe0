"""What the CUDA driver says of device memory: who else may read it. The driver's own library, and no other package.

Calls act in the context that is current on their thread (`BlockMemory.bind_thread`).
"""

import ctypes
from pathlib import Path
from typing import Any

from kvtransfer.transports.base import TransportError

IPC_HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_PEERMEM = Path("/sys/module/nvidia_peermem")  # the kernel module that gives device memory to RDMA ports
_SUCCESS, _ALREADY_MAPPED = 0, 208
_LAZY_ENABLE_PEER_ACCESS = 1
_DMA_BUF_SUPPORTED = 124  # CUdevice_attribute: memory can be given to RDMA ports without that module


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class CudaDriver:
    """The driver of this process's devices."""

    def __init__(self, library: Any = None, peermem: Path = _PEERMEM) -> None:
        """library: with the driver's functions; None: the installed one. Raises TransportError where there is none."""
        try:
            self._library = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError as error:
            raise TransportError(f"no CUDA driver: {error}") from error
        self._peermem = peermem

    def export(self, address: int) -> bytes | None:
        """What another process needs to read the allocation at this address, by CUDA IPC.

        None: it cannot be exported, as memory that was mapped rather than allocated (torch's expandable segments).
        """
        handle = _IpcHandle()
        status = self._library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle) if status == _SUCCESS else None

    def why_not_readable(self, exported: bytes) -> str | None:
        """Tries to map what another process exported; None where it can be mapped here. Nothing stays mapped."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(exported)
        status = self._library.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        )
        if status == _SUCCESS:
            self._library.cuIpcCloseMemHandle(address)
        return None if status in (_SUCCESS, _ALREADY_MAPPED) else self._name(status)

    def serves_rdma(self, device: int) -> bool:
        """True where RDMA ports can be given the memory of this device (GPUDirect): so the driver or the kernel says.

        Whether they take it cannot be seen from here.
        """
        handle, supported = ctypes.c_int(), ctypes.c_int()
        status = self._library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device))
        if status == _SUCCESS:
            status = self._library.cuDeviceGetAttribute(ctypes.byref(supported), _DMA_BUF_SUPPORTED, handle)
        return (status == _SUCCESS and supported.value != 0) or self._peermem.exists()

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(name))
        return "unknown error" if name.value is None else name.value.decode()
