"""Requests and blocks in a gateway's `/debug/ledger` that should be gone when nothing runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The rest of requests: blocks that are neither free nor evictable, ledger entries, sequences of workers."""

    blocks: int = 0
    entries: int = 0
    sequences: int = 0

    def __bool__(self) -> bool:
        return bool(self.blocks or self.entries or self.sequences)


def leftovers(ledger: Mapping[str, Any]) -> Leftovers:
    """Counts what one gateway knows of, over all workers that it is connected to."""
    workers = ledger["workers"]
    return Leftovers(
        blocks=sum(worker["num_blocks"] - worker["available_blocks"] for worker in workers),
        entries=len(ledger["rows"]),
        sequences=sum(worker["running"] + worker["waiting"] for worker in workers),
    )
