"""The messages of gateway and worker on their stream, beside frames.

    gateway                            worker
    GatewayHello          ──▶
                          ◀──          WorkerHello
    Submit, Abort ...     ──▶                              in the order of their handles, also several at once
                          ◀──          Frame, BlockEvents ...   no events for a gateway that reads the index in Redis
                          ◀──          WorkerNews               whenever the worker can do more, or less

Processes whose major versions differ refuse each other, with the reason in the error; minor versions may differ
(versions.py).
"""

from dataclasses import dataclass

from kvtransfer.ids import GatewayId, WorkerId
from services.config import WorkerRole
from services.protocol.block_hash import BlockHash
from services.protocol.capsule import Capsule
from services.protocol.frames import Frame
from services.protocol.versions import PROTOCOL_MAJOR, PROTOCOL_MINOR

MAX_HANDLE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class GatewayHello:
    """Opens a stream. Handles up to `highest_handle` that the worker does not know are over."""

    gateway: GatewayId
    highest_handle: int  # the highest handle used so far; 0: none
    wants_block_events: bool = True
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """Answers the gateway's hello: the worker's identity and limits."""

    worker_id: WorkerId
    role: WorkerRole
    fingerprint: str
    kv_protocol: int
    transports: tuple[str, ...]  # ways in which its KV can move
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    model: str = ""  # `model_digest`; empty: unknown
    kernels: str = ""  # the kernels' class of processors, "torch" or "cuda"; empty: unknown
    time_us: int = 0  # its clock when it said this: microseconds of UNIX time; 0: not told
    embedding_size: int = 0  # numbers of an embedding; 0: it makes none
    kv_token_bytes: int = 0  # of one token's KV in all layers, which a handoff moves; 0: not told
    weight_bytes: int = 0  # of the model's weights in its memory; 0: not told
    shares_weights: bool = False  # other workers of its host map the same memory
    num_ranks: int = 0  # processes that share its model; 0: not told
    knows: frozenset[str] = frozenset()  # names of its capabilities, see capabilities.py
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """Says what a worker can do from now on, in the place of what its hello said. See WorkerHello."""

    knows: frozenset[str]
    embedding_size: int = 0


@dataclass(frozen=True, slots=True)
class HandTo:
    """The consumer of a handoff, for its producer."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class TakeFrom:
    """The producer of a handoff and its address, for its consumer."""

    address: str  # host:port
    worker: WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """One attempt at one choice of a request. Without a handoff, one worker computes it alone.

    With seeds it is an attempt at several choices over one prompt, which is computed and handed over once: `handle`
    names the prompt, and the choices have the handles that follow, one for each seed.
    """

    handle: int
    capsule: Capsule
    timeout_s: float  # from receipt on: clocks of two hosts are never compared
    request_id: str = ""
    handoff: HandTo | TakeFrom | None = None
    seeds: tuple[int, ...] = ()  # unsigned, 64 bits

    @property
    def last_handle(self) -> int:
        """Returns the highest handle that the attempt uses."""
        return self.handle + len(self.seeds)


@dataclass(frozen=True, slots=True)
class Abort:
    """The gateway wants no more of this handle: of a choice, or of a prompt with all its choices so far.

    An abort may come at any time, and more than once.
    """

    handle: int


Command = Submit | Abort


@dataclass(frozen=True, slots=True)
class Commands:
    """Several commands in one message, in order. The concatenated bytes of two such messages are one message with all
    commands of both.
    """

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Changes of a worker's prefix cache.

    `sequence` rises by one with each message of a stream; the first message is a snapshot: its `added` are all blocks.
    """

    sequence: int
    snapshot: bool
    added: list[BlockHash]
    evicted: list[BlockHash]


GatewayMessage = GatewayHello | Command | Commands
WorkerMessage = WorkerHello | Frame | BlockEvents | WorkerNews
