"""KV of workers of several hosts: what rank 0 and another rank make of a connection between them and a port."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtransfer.transports.base import Memory, Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource
from kvtransfer.transports.remote import PartLink
from protos import kv_pb2, kv_pb2_grpc
from services.config import TransportName
from services.engine.runner.group.connection import Connection, accepted, connect
from services.launcher.authority import Authority
from services.protocol.model_files.base import ModelError
from services.tls.files import CertificateFiles
from services.tls.roles import CertificateRole
from services.worker.rank_parts import RankChannel, RankPart
from services.worker.rank_port import RankPort
from services.worker.transports import make_group_transports
from tests.certificates import Certificates
from tests.kvtransfer.kv_source import block_read, new_worker_id, wait_for_ends
from tests.kvtransfer.part_processes import DEADLINE_S
from tests.kvtransfer.ranks import PLAIN, Ranks, group, pools_of, some_content

RANKS = group(PLAIN, "2")
SOURCE, DESTINATION = [4, 1, 2, 5], [0, 3, 4, 8]


def connections() -> tuple[Connection, Connection]:
    """Both ends of one, which beat as those of a group do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        theirs = connect(host, port, None, most_bytes=1 << 16, patience_s=DEADLINE_S)
        return accepted(server.accept()[0], None, most_bytes=1 << 16, patience_s=DEADLINE_S), theirs


@dataclass
class Worker:
    """A worker of two hosts."""

    id: int
    address: str
    memories: list[Memory]
    transports: dict[str, Transport]
    rank: threading.Thread
    fatal: list[str]


@contextmanager
def worker(
    name: TransportName, ranks: Ranks, content: np.ndarray | None = None, tls: CertificateFiles | None = None
) -> Iterator[Worker]:
    """Content: of whole blocks, whose generations then tell it; None: canaries."""
    with ExitStack() as stack:
        ports = []
        for _ in range(2):
            ports.append(RankPort("127.0.0.1", 0, tls))
            stack.callback(ports[-1].close)
        memories = [ranks.new_part(range(rank, rank + 1), content) for rank in range(2)]
        if content is not None:
            memories[0].generations[:] = np.arange(len(content)) + 1000
        ours, theirs = connections()
        fatal: list[str] = []
        part = RankPart(1, memories[1].blocks, ports[1], f"127.0.0.1:{ports[1].port}")
        rank = part.serve(theirs, fatal.append)
        link = PartLink(1, RankChannel(ours))
        source = BlockSource(new_worker_id(), memories[0])
        ports[0].read_from(source)
        made = make_group_transports(name, [link])(source, ports[0].dial)
        for transport in made:
            transport.set_pace(0.0005)
        yield Worker(
            source.worker_id,
            f"127.0.0.1:{ports[0].port}",
            memories,
            {transport.name: transport for transport in made},
            rank,
            fatal,
        )
        for transport in made:
            transport.close()
        link.close()
        rank.join()
        theirs.close()
        assert fatal == []


def check_handoff(kind: str, producer: Worker, consumer: Worker, content: np.ndarray) -> None:
    reader, source = consumer.transports[kind], producer.transports[kind]
    reader.add_worker(producer.id, producer.address, source.descriptor())  # type: ignore[arg-type]
    reader.post(block_read(1, producer.id, SOURCE, DESTINATION))  # type: ignore[arg-type]
    words = wait_for_ends(reader, 1, source)[1].generations
    assert words is not None
    assert words.tolist() == [block + 1000 for block in SOURCE]
    for memory, own in zip(consumer.memories, RANKS.cut(content), strict=True):
        [pool] = pools_of(memory)
        assert np.array_equal(pool[DESTINATION], own[SOURCE])


def test_workers_of_two_hosts_hand_over_by_each_transport() -> None:
    content = some_content(PLAIN, seed=21)
    with worker(TransportName.AUTO, RANKS, content) as producer, worker(TransportName.AUTO, RANKS) as consumer:
        assert list(producer.transports) == list(consumer.transports) == ["nixl", "grpc"]
        for kind in producer.transports:
            check_handoff(kind, producer, consumer, content)


def test_ranks_read_each_other_with_tls_and_nobody_reads_them_without(tmp_path_factory: pytest.TempPathFactory) -> None:
    certificates = Certificates(Authority(), tmp_path_factory.mktemp("certificates"))
    files = certificates.files(CertificateRole.PREFILL, CertificateRole.DECODE)
    content = some_content(PLAIN, seed=22)
    with ExitStack() as stack:
        producer = stack.enter_context(worker(TransportName.GRPC, RANKS, content, files))
        consumer = stack.enter_context(worker(TransportName.GRPC, RANKS, tls=files))
        check_handoff("grpc", producer, consumer, content)
        plain = stack.enter_context(worker(TransportName.GRPC, RANKS))
        reader, source = plain.transports["grpc"], producer.transports["grpc"]
        reader.add_worker(producer.id, producer.address, source.descriptor())  # type: ignore[arg-type]
        reader.post(block_read(1, producer.id, SOURCE, DESTINATION))  # type: ignore[arg-type]
        assert wait_for_ends(reader, 1)[1].generations is None


async def test_a_rank_says_by_grpc_that_it_serves_and_gives_nothing_before() -> None:
    port = RankPort("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest()
        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="this process has no blocks yet"):
            await kv_pb2_grpc.KvBytesStub(channel).Read(kv_pb2.ReadRequest()).read()
        port.serves()
        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
    await asyncio.to_thread(port.close)


def test_a_rank_whose_port_is_taken_is_refused_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ModelError, match=f"cannot listen on 127.0.0.1:{number}"):
            RankPort("127.0.0.1", number)


def test_a_rank_that_does_not_know_what_rank_0_says_ends() -> None:
    ours, theirs = connections()
    port, fatal = RankPort("127.0.0.1", 0), list[str]()
    thread = RankPart(1, RANKS.new_part(range(1, 2)).blocks, port, "").serve(theirs, fatal.append)
    ours.send((b"hello",))
    thread.join()
    [reason] = fatal
    assert "the first message is a message of 5 bytes" in reason
    for end in (ours, theirs):
        end.close()
    port.close()


def test_hosts_without_a_transport_in_common_are_refused_in_words() -> None:
    """The other one was made with another --transport, as no group is."""
    ours, theirs = connections()
    port, link = RankPort("127.0.0.1", 0), PartLink(1, RankChannel(ours))
    part = RankPart(1, RANKS.new_part(range(1, 2)).blocks, port, "")
    thread = part.serve(theirs, pytest.fail)
    link.begin(new_worker_id(), TransportName.GRPC)
    link.hello(DEADLINE_S)
    memory = RANKS.new_part(range(1))
    with pytest.raises(TransportError, match="nixl here, grpc there"):
        make_group_transports(TransportName.NIXL, [link])(BlockSource(new_worker_id(), memory), port.dial)
    link.close()
    thread.join()
    theirs.close()
    port.close()
