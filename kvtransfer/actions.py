"""Actions: what the two sides of handoffs want done by whoever drives them, who owns engine, streams and transport."""

from dataclasses import dataclass, field

from kvtransfer.ids import AttemptId, StreamId
from kvtransfer.messages import EndReason, FirstToken, ToConsumer, ToProducer
from kvtransfer.moved import Moved
from kvtransfer.transports.base import BlockRead


@dataclass(frozen=True, slots=True)
class FailHandoff:
    """Tell the gateway that this handoff failed, and why. Both sides may want it."""

    id: AttemptId
    reason: EndReason


# The producer's.


@dataclass(frozen=True, slots=True)
class SendToConsumer:
    """Put this message on the control stream, if that is still there."""

    stream: StreamId
    message: ToConsumer


@dataclass(frozen=True, slots=True)
class StopComputing:
    """Compute this sequence no further, but keep its blocks."""

    id: AttemptId


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Compute this sequence no further, and free its blocks."""

    id: AttemptId


ProducerAction = SendToConsumer | StopComputing | FreeBlocks | FailHandoff


# The consumer's.


@dataclass(frozen=True, slots=True)
class SendToProducer:
    """Put this message on the control stream, if that is still there."""

    stream: StreamId
    message: ToProducer


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Reserve blocks for this prompt, in turn, and answer with `reserved`: the producer has announced its first ones.

    Comes again with further ones, which tells how fast the producer is.
    """

    id: AttemptId
    num_announced: int


@dataclass(frozen=True, slots=True)
class PostRead:
    """Ask the transport to do this read, and answer with `read_ended`."""

    read: BlockRead


@dataclass(frozen=True, slots=True)
class AbandonRead:
    """Tell the transport that nobody waits for this read. Its end is still to be answered with `read_ended`."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Use the sequence's first `num_blocks` blocks: they are here and checked."""

    id: AttemptId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Let the sequence, or each over this prompt, go on from its first token: all blocks are here."""

    id: AttemptId
    first_tokens: tuple[FirstToken, ...]
    moved: Moved = field(default_factory=Moved)


@dataclass(frozen=True, slots=True)
class FreeSequence:
    """Free the sequence's blocks, except those `quarantined`: an open read may still write to them."""

    id: AttemptId
    quarantined: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """Free these blocks, which were in quarantine."""

    blocks: tuple[int, ...]


ConsumerAction = (
    SendToProducer | Enqueue | PostRead | AbandonRead | Arrived | Ready | FreeSequence | FreeQuarantined | FailHandoff
)
