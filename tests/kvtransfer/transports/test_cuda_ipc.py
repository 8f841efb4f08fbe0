"""When reads of device memory are one-sided. The CUDA driver is played: what it says decides."""

import ctypes
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.cuda_driver import IPC_HANDLE_BYTES, CudaDriver
from kvtransfer.transports.one_sided import DevicePool, Here, Means, Whereabouts
from tests.kvtransfer.transports.test_one_sided import infiniband, other_process

ADDRESS = 0x7F12_3456_7800_0000
INVALID_VALUE, INVALID_CONTEXT, ALREADY_MAPPED = 1, 201, 208


@dataclass
class PlayedCuda:
    """The functions of libcuda that we call; handles hold the address that they export."""

    exports: bool = True
    opens: int = 0  # what opening a handle returns
    has_dma_buf: bool = False
    mapped: list[int] = field(default_factory=list)

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        ctypes.memmove(handle, ctypes.byref(address), 8)
        return 0 if self.exports else INVALID_VALUE

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: ctypes.Structure, flags: ctypes.c_uint) -> int:
        assert flags.value == 1
        if self.opens == 0:
            address._obj.value = int.from_bytes(bytes(handle)[:8], "little")
            self.mapped.append(address._obj.value)
        return self.opens

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        self.mapped.remove(address.value)
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: ctypes.c_int) -> int:
        handle._obj.value = ordinal.value + 100
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: ctypes.c_int) -> int:
        assert (attribute, handle.value) == (124, 101)
        value._obj.value = self.has_dma_buf
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = {INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT"}.get(status)
        return 0


def here(
    directory: Path, cuda: PlayedCuda | None = None, environ: dict[str, str] | None = None, **ports: tuple[str, str]
) -> Here:
    """This process, its pool on device 1 of these."""
    driver = CudaDriver(cuda or PlayedCuda(), directory / "nvidia_peermem")
    return Here(environ or {}, infiniband(directory, **ports), DevicePool(driver, 1, ADDRESS))


def device_pool_of(process: Whereabouts, cuda: PlayedCuda | None = None) -> Whereabouts:
    """The process, had it a pool on a device."""
    exported = CudaDriver(cuda or PlayedCuda()).export(ADDRESS)
    return replace(process, means=process.means | Means.CUDA_IPC, device=0, exported=exported)


def test_device_memory_that_can_be_mapped_is_read_and_nothing_stays_mapped(tmp_path: Path):
    cuda = PlayedCuda()
    reader = here(tmp_path, cuda)
    with other_process() as process:
        reach = reader.reach(device_pool_of(process))
    assert reach.one_sided
    assert "CUDA IPC" in reach.why
    assert cuda.mapped == []


def test_memory_that_is_mapped_here_already_is_read(tmp_path: Path):
    with other_process() as process:
        assert here(tmp_path, PlayedCuda(opens=ALREADY_MAPPED)).reach(device_pool_of(process)).one_sided


def test_each_thing_that_is_missing_is_named(tmp_path: Path):
    with other_process() as process:
        there = device_pool_of(process)
        cannot_map = here(tmp_path, PlayedCuda(opens=INVALID_CONTEXT)).reach(there)
        not_exported = here(tmp_path).reach(device_pool_of(process, PlayedCuda(exports=False)))
        other_host = here(tmp_path).reach(replace(there, boot_id=bytes(36)))
        no_cma = here(tmp_path).reach(replace(there, means=Means.CUDA_IPC))  # the generation words need it
    reaches = [cannot_map, not_exported, other_host, no_cma]
    assert not any(reach.one_sided for reach in reaches)
    for reach, word in zip(reaches, ["INVALID_CONTEXT", "exported", "another host", "CMA"], strict=True):
        assert word in reach.why


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, True),
        ({"UCX_TLS": "all"}, True),
        ({"UCX_TLS": "sm,cuda,tcp"}, True),
        ({"UCX_TLS": "cma,cuda_copy,cuda_ipc"}, True),
        ({"UCX_TLS": "sm,cuda_copy,tcp"}, False),
        ({"UCX_TLS": "sm,tcp"}, False),
        ({"UCX_TLS": "^tcp"}, True),
        ({"UCX_TLS": "^cuda_ipc"}, False),
        ({"UCX_TLS": "^cuda"}, False),
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}, True),
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}, False),
    ],
)
def test_what_ucx_may_not_use_does_not_count(environ: dict[str, str], allowed: bool, tmp_path: Path):
    with other_process() as process:
        reach = here(tmp_path, environ=environ).reach(device_pool_of(process))
    assert reach.one_sided == allowed
    assert allowed or "environment" in reach.why


def test_between_device_and_host_memory_nothing_is_one_sided(tmp_path: Path):
    port = ("4: ACTIVE", "InfiniBand")
    host, device = Here({}, infiniband(tmp_path / "a", mlx5_0=port)), here(tmp_path / "b", mlx5_0=port)
    for reach in (host.reach(device.whereabouts), device.reach(host.whereabouts)):
        assert not reach.one_sided
        assert "host memory" in reach.why


@pytest.mark.parametrize("given_by", ["driver", "kernel module", None])
def test_rdma_counts_where_its_ports_are_given_device_memory(given_by: str | None, tmp_path: Path):
    if given_by == "kernel module":
        (tmp_path / "nvidia_peermem").touch()
    reader = here(tmp_path, PlayedCuda(has_dma_buf=given_by == "driver"), mlx5_0=("4: ACTIVE", "InfiniBand"))
    reach = reader.reach(replace(reader.whereabouts, boot_id=bytes(36)))
    assert reach.one_sided == (given_by is not None)
    assert "RDMA" in reach.why


@pytest.mark.parametrize("exports", [True, False])
def test_where_a_pool_is_gets_into_a_descriptor_and_out(exports: bool, tmp_path: Path):
    device = here(tmp_path / "a", PlayedCuda(exports=exports)).whereabouts
    host = Here({}, infiniband(tmp_path / "b")).whereabouts
    assert device.device == 1
    assert (device.exported is not None) == exports
    for whereabouts in (device, host):
        assert Whereabouts.unpack(whereabouts.pack()) == whereabouts
        assert len(whereabouts.pack()) == 136


def test_a_process_does_not_read_its_own_device_memory_as_another_s(tmp_path: Path):
    """CUDA refuses to map in a process what the same process exported, and UCX knows."""
    reader = here(tmp_path, PlayedCuda(opens=INVALID_CONTEXT))
    assert reader.whereabouts.pid == os.getpid()
    assert not reader.reach(reader.whereabouts).one_sided


def test_without_a_driver_there_is_no_device_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvtransfer.transports.cuda_driver._LIBRARY", "libcuda.so.none")
    with pytest.raises(TransportError, match="no CUDA driver"):
        CudaDriver()
    assert IPC_HANDLE_BYTES == 64  # sizeof(CUipcMemHandle)
