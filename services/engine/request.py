"""A request as the engine knows it, before and while it has a slot."""

from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.messages import HandoffId
from services.protocol.capsule import Capsule


class Kind(Enum):
    """What this engine does for a request."""

    LOCAL = auto()  # computes the prompt and generates
    PRODUCE = auto()  # computes the prompt, samples the first token, holds the blocks for a consumer
    CONSUME = auto()  # takes the blocks from a producer and generates


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one choice. Times are those of `time.monotonic`, in seconds."""

    id: HandoffId
    capsule: Capsule
    kind: Kind
    arrival: float
    deadline: float
    peer: int = 0  # the other side's incarnation, for PRODUCE and CONSUME
    work: int = 0  # tokens to compute, as far as the prefix cache knew when it came
    started: bool = False  # its first row was sent; it comes back after a preemption
    looked_at: int = -1  # version of the prefix cache at which it was found to wait for a pending block
