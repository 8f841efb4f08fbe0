"""The choice of the transport by which a consumer reads a producer: a pure function of the transports of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtransfer.transports.base import Transport, TransportError


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport of the consumer, and the reason for it, which is logged."""

    transport: Transport
    why: str


def choose(ours: Sequence[Transport], offers: Mapping[str, bytes]) -> Choice:
    """Chooses the first transport that reads the producer without its help; else the last, which needs the least help.

    ours: the consumer's transports, best first. offers: the producer's descriptors, by transport. Raises TransportError
    where no transport is on both sides, where the only one cannot read the producer, or a descriptor is not one.
    """
    shared = [transport for transport in ours if transport.name in offers]
    if len(shared) < 2:
        both = f"{', '.join(transport.name for transport in ours)} here, {', '.join(offers) or 'none'} there"
        if not shared:
            raise TransportError(f"no transport is on both sides: {both}")
        reach = shared[0].reach(offers[shared[0].name])
        if not reach.possible:
            raise TransportError(f"{shared[0].name} alone is on both sides, and does not get there: {reach.why}")
        return Choice(shared[0], f"no other is on both sides: {both}")
    whys = []
    for transport in shared:
        reach = transport.reach(offers[transport.name])
        if reach.one_sided:
            return Choice(transport, reach.why)
        whys.append(f"not {transport.name}: {reach.why}")
    return Choice(shared[-1], "; ".join(whys[:-1]))
