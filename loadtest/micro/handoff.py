"""One handoff at a time between two idle workers: from the prompt's last step to the first one of decode.

`ready_ms` is from the end of prefill's last step until decode begins the sequence's first one: announcement, read,
check, and the way between threads and processes. `read_ms` is the last read in it, as the transfer thread sees it,
`raw_ms` a read of as many blocks by NIXL alone, without workers around it; `of_raw` is the share of that bandwidth.
`gap_ms` is the time that a client sees between token 1, which prefill sends, and token 2. With `chunk` below the
prompt, blocks of earlier chunks move while later ones are computed.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from loadtest.micro.handoff_worker import LAYOUT, MAX_MODEL_LEN, NUM_BLOCKS, VOCABULARY, timed_parts
from loadtest.micro.idle_runner import BLOCK_SIZE
from loadtest.micro.transport import reading
from loadtest.micro.worker_pair import Handoff, worker_pair
from loadtest.tables import Record, spread
from services.config import TransportName

_BLOCKS = (1, 4, 16, 64, 256, 512)
_CHUNK = 2048  # tokens, as in `baton up`


async def measure(rounds: int) -> list[Record]:
    """Measures prompts of one chunk, then those of several."""
    raw = _raw(rounds)
    whole = await handoffs(MAX_MODEL_LEN, _BLOCKS, rounds)
    chunked = await handoffs(_CHUNK, [blocks for blocks in _BLOCKS if blocks * BLOCK_SIZE > _CHUNK], rounds)
    records = [_record(blocks, "whole", found, raw[blocks]) for blocks, found in whole.items()]
    last = _CHUNK // BLOCK_SIZE  # blocks of the last chunk, which are left to be read
    return records + [_record(blocks, _CHUNK, found, raw[last]) for blocks, found in chunked.items()]


def _raw(rounds: int) -> dict[int, float]:
    """Measures reads by NIXL alone: median seconds by the number of blocks, each read of other blocks."""
    sizes = {*_BLOCKS, _CHUNK // BLOCK_SIZE}
    with reading(TransportName.NIXL, NUM_BLOCKS, LAYOUT.block_bytes) as read:
        return {blocks: float(np.median([read(blocks) for _ in range(rounds)])) for blocks in sizes}


def _record(blocks: int, chunk: str | int, found: list[Handoff], raw_s: float) -> Record:
    figures = spread([each.ready_s * 1e3 for each in found])
    read_s = float(np.median([each.read_s for each in found]))
    return {
        "blocks": blocks,
        "mib": blocks * LAYOUT.block_bytes / 2**20,
        "chunk": str(chunk),
        **{f"ready_ms_{name}": value for name, value in figures.items()},
        "read_ms": read_s * 1e3,
        "raw_ms": raw_s * 1e3,
        "of_raw": raw_s / read_s,
        "gap_ms": float(np.median([each.gap_s for each in found])) * 1e3,
    }


async def handoffs(max_num_batched_tokens: int, sizes: Sequence[int], rounds: int) -> dict[int, list[Handoff]]:
    """Measures handoffs between a pair of workers by the number of blocks; the first one of each size is left out."""
    random = np.random.default_rng(0)
    async with worker_pair(partial(timed_parts, max_num_batched_tokens)) as pair:
        found: dict[int, list[Handoff]] = {blocks: [] for blocks in sizes}
        for _ in range(rounds + 1):
            for blocks in sizes:
                prompt = random.integers(0, VOCABULARY, blocks * BLOCK_SIZE, dtype=np.int32)
                found[blocks].append(await pair.hand_over(prompt))
    return {blocks: handoffs[1:] for blocks, handoffs in found.items()}
