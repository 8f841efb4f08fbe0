"""The transports of a worker, by its `--transport`, and of each process of one whose ranks are on several hosts."""

from collections.abc import Sequence

import structlog

from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from kvtransfer.transports.group import GroupTransport
from kvtransfer.transports.remote import PartLink
from services.config import TransportName
from services.worker.worker import MakeTransports

_HELLO_S = 120.0  # until the processes of the other parts, which have loaded by then, have their transports

log = structlog.get_logger()


def make_transports(name: TransportName, part: int = 0) -> MakeTransports:
    """`auto`: all that are usable here; which of them reads a producer is chosen for each.

    part: the number of this process among those of the worker.
    """

    def nixl(source: BlockSource, dial: Dial) -> list[Transport]:
        from kvtransfer.transports.nixl import NixlTransport

        return [NixlTransport(source.worker_id, source.memory, part)]

    def grpc(source: BlockSource, dial: Dial) -> list[Transport]:
        return [ByteStreamTransport(source, dial, part)]

    def every(source: BlockSource, dial: Dial) -> list[Transport]:
        try:
            return [*nixl(source, dial), *grpc(source, dial)]
        except TransportError as error:
            log.info("KV moves over grpc alone", why=str(error))
            return grpc(source, dial)

    return {TransportName.AUTO: every, TransportName.NIXL: nixl, TransportName.GRPC: grpc}[name]


def make_group_transports(name: TransportName, links: Sequence[PartLink]) -> MakeTransports:
    """Makes the transports of rank 0 of a worker of several hosts: those that all of its processes have.

    links: to the processes of the other parts, which make theirs now.
    """

    def make(source: BlockSource, dial: Dial) -> list[Transport]:
        for link in links:
            link.begin(source.worker_id, name)
        own = make_transports(name)(source, dial)
        offered = [link.hello(_HELLO_S).offers for link in links]
        shared = [transport for transport in own if all(transport.name in offers for offers in offered)]
        if not shared:
            here, there = ", ".join(transport.name for transport in own), [", ".join(offers) for offers in offered]
            raise TransportError(f"no transport is on all hosts: {here} here, {' and '.join(there)} there")
        return [GroupTransport(each, [link.transport(each.name) for link in links]) for each in shared]

    return make
