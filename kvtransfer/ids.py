"""The ids of workers, gateways, attempts and control streams."""

from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)
"""One life of a worker process: 64 random bits, drawn at its start. A worker that was restarted has another id."""

GatewayId = NewType("GatewayId", int)
"""One life of a gateway: 64 random bits, drawn at its start, and again where it has used up all handles."""

StreamId = NewType("StreamId", int)
"""One life of a control stream between two workers, never used twice in a process."""


class AttemptId(NamedTuple):
    """One attempt at one choice of a request, or at a prompt that several choices share; the same on every worker."""

    gateway: GatewayId
    handle: int  # the gateway counts them from 1
