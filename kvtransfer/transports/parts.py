"""Descriptors of a worker whose memory is in several processes: for each part, its own descriptor and address.

A worker is one process to a transport, or several, on several hosts, which each have a part of every block. Part 0 is
the worker's own process, and has the generation words of all blocks. Versions before parts refuse such a descriptor: a
producer does not offer it to them (`has_parts`).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.sealed import Seal

_SEAL = Seal("parts", b"BTPT", 1)
_COUNT = struct.Struct("<I")
_LENGTHS = struct.Struct("<HI")


@dataclass(frozen=True, slots=True)
class PartOffer:
    """All that a reader must know of one part of a worker."""

    address: str  # host:port at which the part's process listens; empty: that of the worker
    descriptor: bytes  # of the transport


def join_parts(offers: Sequence[PartOffer]) -> bytes:
    """Returns the descriptor of a worker of several parts."""
    packed = [_COUNT.pack(len(offers))]
    for offer in offers:
        address = offer.address.encode()
        packed += [_LENGTHS.pack(len(address), len(offer.descriptor)), address, offer.descriptor]
    return _SEAL.close(b"".join(packed))


def has_parts(descriptor: bytes) -> bool:
    """Tells whether bytes, which may be anything, are the descriptor of a worker of several parts."""
    return _SEAL.is_of(descriptor)


def parts_of(address: str, descriptor: bytes) -> tuple[PartOffer, ...]:
    """Returns the parts of the worker that listens at an address; of one that has none, itself.

    Raises TransportError for what is damaged.
    """
    if not has_parts(descriptor):
        return (PartOffer(address, descriptor),)
    body = _SEAL.open(descriptor, _COUNT.size)
    try:
        (count,) = _COUNT.unpack_from(body)
        at, found = _COUNT.size, []
        for _ in range(count):
            sizes = _LENGTHS.unpack_from(body, at)
            middle = at + _LENGTHS.size + sizes[0]
            own, at = body[at + _LENGTHS.size : middle].decode(), middle + sizes[1]
            found.append(PartOffer(own or address, body[middle:at]))
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError(f"a descriptor without its parts: {error}") from error
    if not found or at != len(body):
        raise TransportError(f"a descriptor without its {count} parts")
    return tuple(found)
