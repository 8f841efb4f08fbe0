"""Findings on a machine: its processor, memory, limits, ports and ways to move KV."""

import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports.one_sided import Means
from services.config import CPU_ISA_VARIABLE
from services.doctor import accelerator, memory, ports, processor, transports
from services.doctor.finding import Level
from services.launcher.authority import Authority
from tests.certificates import Certificates
from tests.doctor.findings import named


def test_a_class_of_processors_that_does_not_exist_is_an_error() -> None:
    assert processor.check_class({CPU_ISA_VARIABLE: "mmx"}).level is Level.ERROR
    assert processor.check_class({}).level in (Level.OK, Level.WARNING)  # a warning where there are no kernels


def test_a_quota_below_the_cores_is_a_warning(tmp_path: Path) -> None:
    assert processor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert processor.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    quota = processor.cpu_quota(tmp_path)
    assert quota == 1.5
    found = processor.check_cores(8, quota)
    assert found.level is Level.WARNING
    assert "--num-threads 1 " in str(found.advice)
    assert processor.check_cores(8, 8.0).level is Level.OK


def test_the_limit_of_a_container_counts_where_it_leaves_less_than_the_machine(tmp_path: Path) -> None:
    assert memory.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{2 << 30}\n")
    assert memory.memory_limit(tmp_path) == 1 << 30
    assert memory.check_free(64 << 30, None).level is Level.OK
    assert memory.check_free(64 << 30, 1 << 30).level is Level.WARNING


def test_few_open_files_are_a_warning() -> None:
    assert memory.check_files(1024).level is Level.WARNING
    assert memory.check_files(65536).level is memory.check_files(resource.RLIM_INFINITY).level is Level.OK


def test_locked_memory_is_an_error_only_where_rdma_needs_it() -> None:
    assert memory.check_locked(8 << 20, has_rdma=True).level is Level.ERROR
    assert memory.check_locked(8 << 20, has_rdma=False).level is Level.NOTE
    assert memory.check_locked(resource.RLIM_INFINITY, has_rdma=True).level is Level.OK


@pytest.mark.parametrize(("chosen", "level"), [("never", Level.WARNING), ("madvise", Level.OK), ("always", Level.OK)])
def test_huge_pages_are_wanted_where_a_process_asks(chosen: str, level: Level, tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    assert memory.check_huge_pages(file).level is Level.NOTE
    file.write_text("always madvise never".replace(chosen, f"[{chosen}]"))
    assert memory.check_huge_pages(file).level is level


def test_shared_memory_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    assert memory.check_shared(tmp_path / "none").level is Level.WARNING


def test_nixl_without_ucx_is_a_warning_and_no_nixl_is_none() -> None:
    assert transports.check_plugins({}).level is Level.NOTE
    assert transports.check_plugins({"nixl 1": ["POSIX"]}).level is Level.WARNING
    assert transports.check_plugins({"nixl 1": ["POSIX", "UCX"]}).level is Level.OK


def test_a_port_for_rdma_is_named() -> None:
    assert "RoCE" in transports.describe_rdma(Means.CMA | Means.ROCE).found
    assert transports.describe_rdma(Means.CMA).level is Level.NOTE


def test_a_driver_without_a_torch_for_it_is_a_warning() -> None:
    told: dict[str, Any] = {"torch": "2.13", "cuda": None, "gpus": []}
    assert named(accelerator.describe(told, "NVRM version 580"), "gpus").level is Level.WARNING
    assert named(accelerator.describe(told, None), "gpus").level is Level.NOTE
    gpu = {"torch": "2.13", "cuda": "13.0", "gpus": [["H200", 141 << 30, "9.0"]]}
    assert "H200 (141 GiB, 9.0); CUDA 13.0" in named(accelerator.describe(gpu, None), "gpus").found


async def test_torch_is_asked_in_another_process() -> None:
    assert named(await accelerator.check_accelerators(), "torch").level is Level.OK


def test_a_port_that_another_program_has_is_a_warning_that_names_the_flag() -> None:
    """This test's process is no process of Baton's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = named(ports.check_ports({port: "--port"}), f"port {port} at 127.0.0.1")
    assert (found.level, found.advice) == (Level.WARNING, "choose another with --port")
    assert named(ports.check_ports({port: "--port"}), "free").found == str(port)


def test_the_ports_are_those_of_the_options() -> None:
    flags = {8000: "--port", 9000: "--grpc-port", 9001: "--admin-port"}
    assert ports.default_ports() == flags | {9100: "--port of prefill", 9200: "--port of decode"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "-m", "services.cli", "gateway"], True),
        (["/usr/bin/python3", "/usr/local/bin/baton", "up"], True),
        (["/usr/local/bin/baton", "decode"], True),
        (["/usr/bin/python3", "-m", "http.server"], False),
        (["vi", "notes", "baton"], False),
        ([], False),
    ],
)
def test_a_process_of_baton_is_known_by_its_command(command: list[str], expected: bool) -> None:
    assert ports.is_baton(command) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("::ffff:10.0.0.1", True),
    ],
)
def test_loopback_is_not_reached_by_others(host: str, expected: bool) -> None:
    """Also as gRPC's listeners have it."""
    assert ports.Listener(host, 1, None, True).is_reached_by_others is expected


def test_plain_text_that_strangers_reach_is_a_warning() -> None:
    listener = ports.Listener("0.0.0.0", 8000, "baton", True)
    assert ports.check_exposed(listener, tls=False).level is Level.WARNING
    assert ports.check_exposed(listener, tls=True).level is Level.OK


async def test_tls_is_told_from_plain_text(certificates: Certificates, authority: Authority) -> None:
    """Also where a server of gRPC asks for a certificate that the doctor does not show."""
    import asyncio

    import grpc

    from services.tls.grpc_ends import open_port
    from services.tls.roles import CertificateRole

    for files in (certificates.files(CertificateRole.WORKER), None):
        server = grpc.aio.server()
        port = open_port(server, "127.0.0.1:0", files)
        await server.start()
        assert await asyncio.to_thread(ports.has_tls, "127.0.0.1", port) is (files is not None)
        await server.stop(None)
