"""When reads are one-sided: what is there, what UCX may use of it, and what can be tried."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.transports import ucx
from kvtransfer.transports.one_sided import Here, Means, Whereabouts, usable_means
from tests.machine import NAMESPACES, needs

# Says where it is, and stays there until its input ends.
TELLS = """
import sys
from kvtransfer.transports.one_sided import Here
here = Here({})
print(here.whereabouts.pack().hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(*prefix: str) -> Iterator[Whereabouts]:
    command = [*prefix, sys.executable, "-c", TELLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Whereabouts.unpack(bytes.fromhex(process.stdout.readline()))


def infiniband(directory: Path, **ports: tuple[str, str]) -> Path:
    """A root with /sys and /dev: state and link layer of each device's port 1."""
    (devices := directory / "dev" / "infiniband").mkdir(parents=True, exist_ok=True)
    for number, (device, (state, link_layer)) in enumerate(ports.items()):
        entry = directory / "sys" / "class" / "infiniband" / device
        (port := entry / "ports" / "1").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link_layer}\n")
        (entry / "device" / "infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
        (devices / f"uverbs{number}").touch()
    return directory


def test_another_process_of_this_host_is_read_until_it_ends(tmp_path: Path):
    here = Here({}, infiniband(tmp_path))
    with other_process() as there:
        assert there.pid != os.getpid()
        assert here.reach(there).one_sided
        assert "another process" in here.reach(replace(there, probe=bytes(16))).why
        assert "another host" in here.reach(replace(there, boot_id=bytes(36))).why
        assert "UCX_TLS" in here.reach(replace(there, means=Means.NONE)).why
    gone = here.reach(there)
    assert not gone.one_sided
    assert "no such process" in gone.why


@needs(NAMESPACES)
def test_a_process_in_another_network_of_this_host_is_not_read(tmp_path: Path):
    """As in containers that share process ids. It could be read, if UCX could connect before."""
    here = Here({}, infiniband(tmp_path))
    with other_process("unshare", "--net") as there:
        reach = here.reach(there)
    assert not reach.one_sided
    assert "another network" in reach.why


@pytest.mark.parametrize("kept_from_it", ["reader", "source"])
def test_what_ucx_may_not_use_on_either_side_does_not_count(kept_from_it: str, tmp_path: Path):
    environ = {kept_from_it: {"UCX_TLS": "tcp,self"}}
    there = Here(environ.get("source", {}), infiniband(tmp_path)).whereabouts
    reach = Here(environ.get("reader", {}), infiniband(tmp_path)).reach(there)
    assert not reach.one_sided
    assert "UCX_TLS" in reach.why


@pytest.mark.parametrize(
    ("ucx_tls", "allowed"),
    [
        (None, True),
        ("all", True),
        ("sm,rc", True),
        ("tcp,cma", True),
        ("posix,sysv,tcp", False),
        ("tcp", False),
        ("^tcp", True),
        ("^cma", False),
        ("^sm,ud", False),
    ],
)
def test_ucx_tls_decides_on_cma(ucx_tls: str | None, allowed: bool, tmp_path: Path):
    environ = {} if ucx_tls is None else {"UCX_TLS": ucx_tls}
    assert bool(usable_means(environ, infiniband(tmp_path)) & Means.CMA) == allowed


def test_only_active_ports_that_ucx_may_use_count_for_rdma(tmp_path: Path):
    tree = infiniband(
        tmp_path, mlx5_0=("4: ACTIVE", "InfiniBand"), mlx5_1=("1: DOWN", "Ethernet"), mlx5_2=("4: ACTIVE", "Ethernet")
    )
    rdma = Means.INFINIBAND | Means.ROCE
    assert usable_means({}, tree) & rdma == rdma
    assert usable_means({"UCX_NET_DEVICES": "mlx5_1:1,mlx5_2:1"}, tree) & rdma == Means.ROCE
    assert usable_means({"UCX_NET_DEVICES": "eth0"}, tree) & rdma == Means.NONE
    assert usable_means({"UCX_TLS": "tcp,sm"}, tree) & rdma == Means.NONE


def test_a_container_counts_the_ports_whose_device_it_was_given(tmp_path: Path):
    """It sees all those of its host."""
    tree = infiniband(tmp_path, mlx5_0=("4: ACTIVE", "InfiniBand"), mlx5_1=("4: ACTIVE", "Ethernet"))
    (tree / "dev" / "infiniband" / "uverbs0").unlink()
    assert usable_means({}, tree) & (Means.INFINIBAND | Means.ROCE) == Means.ROCE
    assert ucx.settings({}, tree)["UCX_NET_DEVICES"] == "lo,mlx5_1:1"


def test_rdma_of_one_kind_on_both_hosts_is_believed(tmp_path: Path):
    ethernet = infiniband(tmp_path / "a", mlx5_0=("4: ACTIVE", "Ethernet"))
    fabric = infiniband(tmp_path / "b", mlx5_0=("4: ACTIVE", "InfiniBand"))
    here = Here({}, ethernet)
    same, other = (replace(Here({}, tree).whereabouts, boot_id=bytes(36)) for tree in (ethernet, fabric))
    assert here.reach(same).one_sided
    assert "RoCE" in here.reach(same).why
    assert not here.reach(other).one_sided


@pytest.mark.parametrize(
    ("environ", "possible"),
    [
        ({"UCX_NET_DEVICES": "lo"}, False),
        ({"UCX_NET_DEVICES": "lo,mlx5_0:1"}, False),  # without such a port on the other side
        ({"UCX_NET_DEVICES": "lo,eth0"}, True),
        ({}, True),
    ],
    ids=["loopback", "loopback and RDMA", "a network", "all"],
)
def test_another_host_is_reached_over_a_network_that_ucx_may_use(
    environ: dict[str, str], possible: bool, tmp_path: Path
):
    here = Here(environ, infiniband(tmp_path / "a", mlx5_0=("4: ACTIVE", "InfiniBand")))
    there = replace(Here({}, infiniband(tmp_path / "b")).whereabouts, boot_id=bytes(36))
    reach = here.reach(there)
    assert (reach.one_sided, reach.possible) == (False, possible)
    assert ("UCX_NET_DEVICES names no other network" in reach.why) != possible


def test_a_process_of_this_host_is_reached_by_loopback_where_its_memory_cannot_be_read(tmp_path: Path):
    here = Here({"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}, infiniband(tmp_path))
    with other_process() as there:
        reach = here.reach(there)
    assert (reach.one_sided, reach.possible) == (False, True)


def test_ucx_listens_on_loopback_alone_and_has_the_active_ports_for_rdma(tmp_path: Path):
    """Its shared memory, for which it makes sockets too, would never be used. What a user chose stays."""
    ours = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "^mm", "UCX_DEBUG_SIGNO": "0"}
    assert ucx.settings({}, infiniband(tmp_path)) == ours
    tree = infiniband(tmp_path, mlx5_0=("4: ACTIVE", "InfiniBand"), mlx5_1=("1: DOWN", "Ethernet"))
    chosen = ucx.settings({}, tree)
    assert chosen["UCX_NET_DEVICES"] == "lo,mlx5_0:1"
    assert usable_means(chosen, tree) == usable_means({}, tree) == Means.CMA | Means.INFINIBAND
    chosen = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "all", "UCX_DEBUG_SIGNO": "SIGUSR1"}
    assert ucx.settings(chosen, tree) == {}
