"""What Baton connects to where another process says so: host:port, and nowhere that no worker is."""

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.ids import WorkerId
from services.config.hosts import AddressError, split_address
from services.config.option import OptionError
from services.prefix_index.registry import WorkerRecord
from services.process.configs import parse_workers
from services.protocol.capsule import Capsule
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.protocol.messages import Submit, TakeFrom
from services.protocol.sampling import SamplingParams
from services.tls.grpc_ends import Channels, check_name
from services.tls.roles import CertificateRole
from services.worker.submit_check import what_is_wrong

CAPSULE = Capsule(np.arange(2, dtype=np.int32), 2, SamplingParams(max_tokens=2))
GOOD = [
    "10.0.0.1:9000",
    "127.0.0.1:1",
    "[::1]:65535",
    "[fd00::7]:80",
    "localhost:9000",
    "decode-0.decode.baton.svc.cluster.local:9000",
    "host_name:9000",
    "unix:9000",  # a host of that name
    "a.b.:9",
]
NO_ADDRESS = [
    "",
    ":",
    "host",
    "host:",
    ":9000",
    "host:0",
    "host:65536",
    "host:+1",
    "host:1e3",
    "host: 1",
    "host:9000 ",
    "host:٣",
    "host:9000\n",
    "unix:/tmp/a",
    "unix:///tmp/a:1",
    "unix-abstract:a:1",
    "/tmp/a:1",
    "vsock:2:1",
    "dns:///host:1",
    "dns://8.8.8.8/host:1",
    "ipv4:10.0.0.1:1",
    "ipv6:[::1]:1",
    "xds:///host:1",
    "http://host:1",
    "user@host:1",
    "user:word@host:1",
    "host/path:1",
    "host:1/path",
    "host?a:1",
    "host%41:1",
    "a,b:1",
    "10.0.0.1:1,10.0.0.2:2",
    "::1:9000",
    "[::1:9000",
    "[[::1]:9000",
    "[::1]]:9000",
    "[[::1]]:9000",
    "[]::1[]:9000",
    "[:9000",
    "[host]:9000",
    "[]:9000",
    "-host:1",
    "a..b:1",
    "a" * 64 + ":1",
    ".".join(["a" * 60] * 5) + ":1",
    "2852039166:1",
    "0xa9fea9fe:1",
    "169.254.43518:1",
    "0251.0376.0251.0376:1",
    "host\0:1",
    "größe:1",
]
NOWHERE = [
    "169.254.169.254:80",
    "169.254.0.1:80",
    "[fe80::1]:80",
    "[fe80::1%eth0]:80",
    "[::ffff:169.254.169.254]:80",
    "[64:ff9b::a9fe:a9fe]:80",
    "[::169.254.169.254]:80",
    "[::ffff:0:169.254.169.254]:80",
    "[64:ff9b:1::a9fe:a9fe]:80",
    "[64:ff9b:1:a9fe:a9:fe00::]:80",
    "[2002:a9fe:a9fe::]:80",
    "[2001:0:1:2::5601:5601]:80",  # Teredo has the client's address inverted
    "[2001:0:a9fe:a9fe::1]:80",
    "[2001:db8::5efe:a9fe:a9fe]:80",
    "[2001:db8::200:5efe:a9fe:a9fe]:80",
    "[fec0::1]:80",
    "[::224.0.0.1]:80",
    "[fd00:ec2::254]:80",
    "[fd20:ce::254]:80",
    "100.100.100.200:80",
    "168.63.129.16:80",
    "0.0.0.0:80",
    "[::]:80",
    "224.0.0.1:80",
    "[ff02::1]:80",
    "255.255.255.255:80",
]


@pytest.mark.parametrize("address", GOOD)
def test_host_and_port(address: str):
    host, port = split_address(address)
    assert f"[{host}]:{port}" == address if ":" in host else f"{host}:{port}" == address


@pytest.mark.parametrize("address", [*NO_ADDRESS, *NOWHERE])
def test_all_else_is_refused_wherever_it_comes_from(address: str):
    with pytest.raises(AddressError):
        split_address(address)
    with pytest.raises(AddressError):
        Channels().open(address, CertificateRole.WORKER, ())
    record = WorkerRecord(address, "decode", WorkerId(1), "model", "print", 16, 1000)
    with pytest.raises(ValueError, match=r"host:port|no address of a worker|no IP address"):
        WorkerRecord.from_json(record.to_json())
    handoff = TakeFrom(address, WorkerId(1))
    assert what_is_wrong(Submit(1, CAPSULE, 5.0, handoff=handoff), vocab_size=10) == "a producer at no address"
    if "," not in address and address.strip() == address:  # an option is cut there
        with pytest.raises(OptionError):
            parse_workers(address)


@pytest.mark.parametrize("address", GOOD)
def test_a_worker_takes_blocks_from_any_address(address: str):
    submit = Submit(1, CAPSULE, 5.0, handoff=TakeFrom(address, WorkerId(1)))
    assert what_is_wrong(submit, vocab_size=10) is None


async def test_a_host_that_is_called_as_a_scheme_is_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For gRPC, unix:9000 is a socket in the file system."""
    monkeypatch.chdir(tmp_path)
    connections: list[asyncio.StreamWriter] = []
    async with await asyncio.start_unix_server(lambda _reader, writer: connections.append(writer), "9000"):
        async with Channels().open("unix:9000", CertificateRole.WORKER, CLIENT_OPTIONS) as channel:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.channel_ready(), 1)
        for writer in connections:
            writer.close()
    assert connections == []


@pytest.mark.parametrize("ip", ["169.254.169.254", "fe80::1", "100.100.100.200", "0.0.0.0"])
async def test_a_name_that_leads_there_is_refused(ip: str, monkeypatch: pytest.MonkeyPatch):
    """The name server is a stranger's here."""
    known = {"kind.example": ["10.0.0.1"], "evil.example": ["10.0.0.1", ip]}

    def looked_up(host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (found, port)) for found in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    await check_name("kind.example:9000")
    with pytest.raises(AddressError, match=ip):
        await check_name("evil.example:9000")
