"""The transports of a worker, by its `--transport`."""

import structlog

from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from services.config import TransportName
from services.worker.worker import MakeTransports

log = structlog.get_logger()


def make_transports(name: TransportName) -> MakeTransports:
    """`auto`: all that are usable here; which of them reads a producer is chosen for each."""
    return {TransportName.AUTO: _every, TransportName.NIXL: _nixl, TransportName.GRPC: _grpc}[name]


def no_transports(source: BlockSource, dial: Dial) -> list[Transport]:
    """Makes none: a worker of several hosts, whose blocks lie in the memory of all of them, hands over no KV."""
    return []


def _every(source: BlockSource, dial: Dial) -> list[Transport]:
    try:
        return [*_nixl(source, dial), *_grpc(source, dial)]
    except TransportError as error:
        log.info("KV moves over grpc alone", why=str(error))
        return _grpc(source, dial)


def _nixl(source: BlockSource, dial: Dial) -> list[Transport]:
    from kvtransfer.transports.nixl import NixlTransport

    return [NixlTransport(source.worker_id, source.memory)]


def _grpc(source: BlockSource, dial: Dial) -> list[Transport]:
    return [ByteStreamTransport(source, dial)]
