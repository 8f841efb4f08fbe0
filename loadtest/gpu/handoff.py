"""One handoff at a time between two worker processes on one card, with a whole model in each.

`ready_ms` is from the end of prefill's last step until decode launches the sequence's first one. `read_gb_per_s` is the
last read in it, as the transfer thread sees it, over the transport that the record names; `raw_gb_per_s` as many blocks
read by NIXL between two processes without workers around it, and `of_raw` the share of that. TTFT is the pair's, whose
first token prefill sends, beside that of the decode worker alone, which takes prompts in as large steps; `gap_ms` is
from token 1 to token 2. All figures are medians.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvtransfer.transports.base import TransportError
from loadtest.children import child
from loadtest.gpu.shapes import BLOCK_SIZE
from loadtest.gpu.workers import PairSetup, in_turn, pair_of
from loadtest.micro.transport import host_blocks, reading
from loadtest.micro.worker_pair import Handoff, WorkerPair
from loadtest.tables import Record
from services.config import DeviceKind, TransportName
from services.engine.runner.gpu.device_blocks import DeviceBlocks

_RAW_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The pair of workers and the prompts that are measured; by default, on the card."""

    pair: PairSetup = field(default_factory=PairSetup)
    prompts: tuple[int, ...] = (4096, 512, 16_384)  # tokens
    rounds: int = 6
    raw_rounds: int = 4

    def last_blocks(self, num_tokens: int) -> int:
        """Counts the blocks of a prompt that are left to be read when its last step is over."""
        return -(-((num_tokens - 1) % self.pair.prefill_tokens + 1) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Raw:
    """Rates of reads by NIXL alone, without workers."""

    rates: dict[int, float]  # bytes a second, by the number of blocks
    why_none: str = ""


def measure(setup: Setup | None = None) -> Iterator[Record]:
    """Yields a record for each length of prompts."""
    return in_turn(_records(setup or Setup()))


def raw_reads(setup: Setup) -> Raw:
    """Reads in two other processes: this one goes on when they are killed by what they do."""
    with child(_send_raw, setup, is_parent=True) as reader:
        try:
            if not reader.pipe.poll(_RAW_TIMEOUT_S):
                return Raw({}, f"no end after {_RAW_TIMEOUT_S:.0f} s")
            found: Raw = reader.pipe.recv()
        except EOFError:
            return Raw({}, "its process ended")
    return found


def device_blocks(num_blocks: int, block_bytes: int, content: int) -> DeviceBlocks:
    """Allocates blocks in the memory of the first GPU, all bytes `content`."""
    shape = num_blocks, block_bytes
    return DeviceBlocks(torch.full(shape, content, dtype=torch.uint8, device=torch.device("cuda", 0)))


def _send_raw(pipe: Connection, setup: Setup) -> None:
    sizes = sorted({setup.last_blocks(num_tokens) for num_tokens in setup.prompts})
    block_bytes = setup.pair.layout.block_bytes
    make_blocks = device_blocks if setup.pair.device is DeviceKind.CUDA else host_blocks
    try:
        with reading(TransportName.NIXL, 2 * sizes[-1], block_bytes, make_blocks) as read:
            read(sizes[0])  # connects
            seconds = {size: float(np.median([read(size) for _ in range(setup.raw_rounds)])) for size in sizes}
    except (TransportError, EOFError) as error:
        pipe.send(Raw({}, str(error) or "the source's process ended"))
        return
    pipe.send(Raw({size: size * block_bytes / seconds[size] for size in sizes}))


async def _records(setup: Setup) -> AsyncIterator[Record]:
    raw, random = raw_reads(setup), np.random.default_rng(0)
    async with pair_of(setup.pair) as pair:
        for num_tokens in setup.prompts:
            yield await _record(setup, pair, random, num_tokens, raw)


async def _record(setup: Setup, pair: WorkerPair, random: np.random.Generator, num_tokens: int, raw: Raw) -> Record:
    handoffs, alone = [], []
    for _ in range(setup.rounds + 1):
        handoffs.append(await pair.hand_over(setup.pair.prompt(random, num_tokens)))
        alone.append(await pair.alone(setup.pair.prompt(random, num_tokens)))
    num_blocks, block_bytes = -(-num_tokens // BLOCK_SIZE), setup.pair.layout.block_bytes
    first_s, alone_s = _median(handoffs, "first_s"), float(np.median(alone[1:]))
    return {
        "model": setup.pair.name,
        "prompt": num_tokens,
        "blocks": num_blocks,
        "mib": num_blocks * block_bytes / 2**20,
        "ready_ms": _median(handoffs, "ready_s") * 1e3,
        **last_read(handoffs, block_bytes, raw, setup.last_blocks(num_tokens)),
        "ttft_pair_ms": first_s * 1e3,
        "ttft_alone_ms": alone_s * 1e3,
        "added_ms": (first_s - alone_s) * 1e3,
        "ratio": first_s / alone_s,
        "gap_ms": _median(handoffs, "gap_s") * 1e3,
    }


def last_read(handoffs: list[Handoff], block_bytes: int, raw: Raw, wanted: int) -> Record:
    """Returns the median of the handoffs' last reads, and NIXL's own reads of `wanted` blocks beside it."""
    read_s, num_blocks = _median(handoffs, "read_s"), int(_median(handoffs, "read_blocks"))
    rate = num_blocks * block_bytes / read_s
    record: Record = {
        "transport": " and ".join(sorted({handoff.transport.value for handoff in handoffs[1:]})),
        "read_blocks": num_blocks,
        "read_ms": read_s * 1e3,
        "read_gb_per_s": rate / 1e9,
    }
    if raw.why_none:
        return {**record, "raw": f"no NIXL: {raw.why_none}"}
    return {**record, "raw_gb_per_s": raw.rates[wanted] / 1e9, "of_raw": rate / raw.rates[wanted]}


def _median(handoffs: list[Handoff], name: str) -> float:
    """Returns the median of one figure; the first handoff, which connects, is left out."""
    return float(np.median([getattr(handoff, name) for handoff in handoffs[1:]]))
