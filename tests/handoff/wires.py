"""What connects processes in the world of these tests: streams that break in every way, and reads that land late.

A stream has a near end, which opened it, and a far end. Each direction is a queue in order. When a stream breaks, each
end learns it in its own time; what an end had sent before may still be delivered until the other end has noticed.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtransfer.ids import StreamId
from kvtransfer.transports.base import BlockRead

if TYPE_CHECKING:
    from tests.handoff.processes import GatewayNode, WorkerProcess


class Break(Enum):
    """How a stream breaks."""

    CUT = "both directions are lost, neither end has noticed"
    NEAR = "the near end closed it; what it sent before may still arrive"
    FAR = "the far end closed it; what it sent before may still arrive"


@dataclass(eq=False)
class Stream:
    """Two queues, and what each end knows."""

    down: deque[Any] = field(default_factory=deque)  # near end to far end
    up: deque[Any] = field(default_factory=deque)
    down_open: bool = True  # False: nothing is delivered or accepted any more
    up_open: bool = True
    near_knows: bool = False  # that it is broken
    far_knows: bool = False

    @property
    def whole(self) -> bool:
        """True while nothing has happened to it."""
        return self.down_open and self.up_open and not self.near_knows and not self.far_knows

    @property
    def near_can_notice(self) -> bool:
        """True when it is broken, and the near end does not know."""
        return not self.near_knows and not (self.up_open and self.down_open)

    @property
    def far_can_notice(self) -> bool:
        """True when it is broken, and the far end does not know."""
        return not self.far_knows and not (self.up_open and self.down_open)

    def break_it(self, how: Break) -> None:
        """Ends are told by the world, which then calls `near_noticed` and `far_noticed`."""
        if how is not Break.NEAR:
            self.down_open = False
        if how is not Break.FAR:
            self.up_open = False

    def near_noticed(self) -> None:
        """The near end hears no more."""
        self.near_knows, self.up_open = True, False

    def far_noticed(self) -> None:
        """The far end hears no more."""
        self.far_knows, self.down_open = True, False


@dataclass(eq=False)
class GatewayStream(Stream):
    """From a gateway (near) to a worker (far)."""

    gateway: "GatewayNode" = field(kw_only=True)
    worker: "WorkerProcess" = field(kw_only=True)


@dataclass(eq=False)
class ControlStream(Stream):
    """From a consumer (near) to a producer (far)."""

    id: StreamId = field(kw_only=True)
    consumer: "WorkerProcess" = field(kw_only=True)
    producer: "WorkerProcess" = field(kw_only=True)


@dataclass(eq=False)
class Flight:
    """A posted read. Its data lands block by block, whoever still wants it; then the generation words are read."""

    read: BlockRead
    reader: "WorkerProcess"
    source: "WorkerProcess"
    landed: int = 0  # blocks
    reported: bool = False  # its reader was told that it is over

    @property
    def has_data(self) -> bool:
        """True when only the generation words are missing."""
        return self.landed == len(self.read.source)

    def land_block(self) -> None:
        """Copies the next block as it is now."""
        block = slice(self.landed, self.landed + 1)
        there, here = self.source.runner.kv_memory(), self.reader.runner.kv_memory()
        here.write(self.read.destination[block], 0, there.read(self.read.source[block], 0, there.block_bytes))
        self.landed += 1
