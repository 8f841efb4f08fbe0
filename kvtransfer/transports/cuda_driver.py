"""The CUDA driver, asked which device memory other processes can read. Needs the driver's library and no package.

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
_LAZY_ENABLE = 1  # CUipcMem_flags
_DMA_BUF_SUPPORTED = 124  # CUdevice_attribute: device memory can be given to RDMA ports without that module


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class CudaDriver:
    """The driver of the devices that this process sees."""

    def __init__(self, library: Any = None, peermem: Path = _PEERMEM) -> None:
        """Loads the driver. library: its functions; None: the installed library. Raises TransportError without one."""
        try:
            self._library = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError as error:
            raise TransportError(f"no CUDA driver: {error}") from error
        self._peermem = peermem

    def export(self, address: int) -> bytes | None:
        """Exports the allocation at this address: returns a handle by which another process reads it with CUDA IPC.

        None: the memory cannot be exported. It was mapped rather than allocated (torch's expandable segments).
        """
        handle = _IpcHandle()
        status = self._library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle) if status == _SUCCESS else None

    def why_not_readable(self, exported: bytes) -> str | None:
        """Tries to map memory that another process exported; returns the driver's error, None where it can be mapped.

        Nothing stays mapped.
        """
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(exported)
        status = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(_LAZY_ENABLE))
        if status == _SUCCESS:
            self._library.cuIpcCloseMemHandle(address)
        return None if status in (_SUCCESS, _ALREADY_MAPPED) else self._name(status)

    def serves_rdma(self, device: int) -> bool:
        """True where the driver or the kernel can give memory of this device to RDMA ports (GPUDirect).

        The answer does not tell whether the ports accept it.
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
