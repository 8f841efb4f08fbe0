"""The way in which the KV of one handoff came, as its consumer saw it and as gateways are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moved:
    """The reads of a handoff. `num_bytes / reading_s` is the rate that they had, in bytes a second."""

    transport: str = ""  # of the last read; empty: all blocks were cached, and none was read
    why: str = ""  # the reason for this transport and no other, for people
    num_bytes: int = 0  # of KV that were read
    reading_s: float = 0.0  # while at least one read was open
