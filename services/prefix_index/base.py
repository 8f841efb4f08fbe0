"""The seam between the router and whatever remembers which worker caches which prefix.

An index answers with what was true a moment ago: the worker's own lookup decides, and a wrong answer costs time, never
tokens. The caller ignores workers without a live stream.
"""

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.ids import WorkerId
from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents


class PrefixIndex(Protocol):
    """Chains of block hashes, and the workers that cache them. Who caches a block caches its ancestors.

    `wants_block_events`: it lives on `apply`. Otherwise it hears from the workers itself, and `apply` does nothing.
    """

    wants_block_events: bool

    def apply(self, worker: WorkerId, events: BlockEvents) -> None:
        """Takes note of a change of one worker's cache; a snapshot replaces all that was known of it.

        The caller sees to it that no sequence number is missed.
        """

    def placed(self, worker: WorkerId, chain: Sequence[BlockHash]) -> None:
        """Takes note that a prompt with these blocks goes to a worker, which so will cache them."""

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes a worker. An unknown one is no error."""

    async def depths(self, chain: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns how many leading blocks of `chain` each worker caches; workers that cache none are left out.

        Where a worker's chain has a hole the answer may be too short or too long.
        """
