"""Which transport a consumer reads a producer by. A pure function of what both have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtransfer.transports.base import Transport, TransportError


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ours, and why; for the log."""

    transport: Transport
    why: str


def choose(ours: Sequence[Transport], offers: Mapping[str, bytes]) -> Choice:
    """ours: what we have, best first. offers: a producer's descriptors, by transport. Raises TransportError.

    The first that reads the producer without its help; where none does, the last, which needs the least of it.
    """
    shared = [transport for transport in ours if transport.name in offers]
    if len(shared) < 2:
        both = f"{', '.join(transport.name for transport in ours)} here, {', '.join(offers) or 'none'} there"
        if not shared:
            raise TransportError(f"no transport is on both sides: {both}")
        return Choice(shared[0], f"no other is on both sides: {both}")
    whys = []
    for transport in shared:
        reach = transport.reach(offers[transport.name])
        if reach.one_sided:
            return Choice(transport, reach.why)
        whys.append(f"not {transport.name}: {reach.why}")
    return Choice(shared[-1], "; ".join(whys[:-1]))
