"""The transports of a worker, by its `--transport`."""

import os
from collections.abc import Sequence

import structlog

from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from kvtransfer.transports.one_sided import needed_devices
from services.config import TransportName
from services.worker.worker import MakeTransports

log = structlog.get_logger()


def make_transports(name: TransportName) -> MakeTransports:
    """`auto`: all that are usable here; which of them reads a producer is chosen for each."""
    return {TransportName.AUTO: _every, TransportName.NIXL: _nixl, TransportName.GRPC: _grpc}[name]


def _every(source: BlockSource, dial: Dial) -> list[Transport]:
    # Such a worker reads over NIXL only where no process has to help, for which UCX needs few devices.
    try:
        return [_nixl_over(needed_devices(os.environ), source), *_grpc(source, dial)]
    except TransportError as error:
        log.info("KV moves over grpc alone", why=str(error))
        return _grpc(source, dial)


def _nixl(source: BlockSource, dial: Dial) -> list[Transport]:
    return [_nixl_over((), source)]


def _nixl_over(devices: Sequence[str], source: BlockSource) -> Transport:
    from kvtransfer.transports.nixl import NixlTransport

    return NixlTransport(source.worker_id, source.memory, devices)


def _grpc(source: BlockSource, dial: Dial) -> list[Transport]:
    return [ByteStreamTransport(source, dial)]
