"""Attention of a decode step in one layer, over latents and over K and V of as many heads, by turns: a program that
prints one JSON object, for `loadtest.micro.latent`.

    PYTHONPATH=TREE python -P latent_attention.py ROWS CONTEXT DTYPE THREADS RUNS

It measures the services of that tree, so that two versions can be measured by turns; so it imports nothing of loadtest.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from services.engine.kernels.cpu.openmp import load_openmp

_BLOCK = 16
_HEADS, _HEAD_DIM = 16, 128  # of K and V
_RANK, _NOPE, _ROPE = 512, 128, 64  # of DeepSeek-V2-Lite


def main(rows: int, context: int, dtype: str, threads: int, runs: int) -> dict[str, dict[str, float]]:
    """Returns for each kind of attention the median of its seconds, the KV bytes that it reads as its plan says, and
    those that its rows have by the layout.
    """
    load_openmp()  # before torch is imported
    import torch

    from kvtransfer.layout import KvLayout
    from services.engine.attention.base import PagedQueries
    from services.engine.attention.cpu_attention import CpuAttention
    from services.engine.attention.latent import Latent
    from services.engine.attention.latent_cpu_attention import LatentCpuAttention
    from services.engine.kernels.base import Scoring
    from services.engine.kernels.cpu.huge_pages import allocate
    from services.engine.models.head_linear import HeadLinear
    from services.engine.models.latent_products import KvProducts

    _use_threads(threads)
    latent = Latent(_RANK, None, _NOPE, _ROPE, _HEAD_DIM, is_interleaved=True, score_factor=1.0)
    layouts = {
        "latent": KvLayout(1, 1, latent.width, _BLOCK, dtype, num_planes=1),
        "dense": KvLayout(1, _HEADS, _HEAD_DIM, _BLOCK, dtype),
    }
    width = -(-context // _BLOCK)
    num_blocks = rows * width
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(rows, width)
    queries = PagedQueries(np.arange(rows + 1, dtype=np.int32), np.full(rows, context, dtype=np.int32), tables)

    def pool(layout: KvLayout) -> torch.Tensor:
        memory = torch.from_numpy(allocate(num_blocks * layout.block_bytes)).view(getattr(torch, dtype))
        return memory.normal_().view(layout.shape(num_blocks))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(getattr(torch, dtype))

    def product(out: int, depth: int) -> HeadLinear:
        return HeadLinear(some(_HEADS, out, depth) / depth**0.5, fused=True)

    with torch.inference_mode():
        absorbed = LatentCpuAttention(pool(layouts["latent"]), layouts["latent"], _HEADS, latent, fused=True)
        dense = CpuAttention(pool(layouts["dense"]), layouts["dense"], _HEADS, Scoring(_HEAD_DIM**-0.5), fused=True)
        products = KvProducts((), product(_RANK, _NOPE), product(_HEAD_DIM, _RANK))
        q_nope, q_rope, found = some(rows, _HEADS, _NOPE), some(rows, _HEADS, _ROPE), some(rows, _HEADS, _RANK)
        q, k = some(rows, _HEADS, _HEAD_DIM), some(rows, _HEADS, _HEAD_DIM)
        latent_plan, dense_plan = absorbed.prepare(queries), dense.prepare(queries)
        seconds = _by_turns(
            {
                "latent": lambda: absorbed.attend(latent_plan, 0, q_nope, q_rope, products),
                "products of latent": lambda: (products.absorb(q_nope), products.values(found)),
                "dense": lambda: dense.attend(dense_plan, 0, q, k, k),
            },
            runs,
        )
    read = {"latent": _keys_of_latents(latent_plan), "dense": _keys_of_heads(dense_plan)}
    sizes = {
        name: {
            "read_bytes": read[name] * layout.token_bytes,
            "layout_bytes": rows * context * layout.token_bytes,
        }
        for name, layout in layouts.items()
    }
    return {name: {"s": taken, **sizes.get(name, {})} for name, taken in seconds.items()}


def _use_threads(threads: int) -> None:
    import torch

    from services.engine.kernels.cpu.openmp import loaded_openmp

    torch.set_num_threads(threads)
    if (openmp := loaded_openmp()) is not None:
        openmp.set_num_threads(threads)
        openmp.spin()


def _keys_of_latents(plan: Any) -> int:
    """Returns how many keys a `LatentPlan` of rows with one token each reads."""
    read = (tiles.limits[tiles.starts[1:].long() - 1] - tiles.first_keys for tiles in plan.absorbed.passes)
    return sum(int(some.sum()) for some in read)


def _keys_of_heads(plan: Any) -> int:
    """Returns how many keys a `CpuPlan` of rows with one token each reads."""
    return sum(int((work.singles.seq_lens - work.singles.first_keys).sum()) for work in plan.work)


def _by_turns(kinds: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Returns the median seconds of each kind: one run of each after the other, so often."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 + runs):
        for name, run in kinds.items():
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    return {name: float(np.median(times[1:])) for name, times in taken.items()}


if __name__ == "__main__":
    rows, context, dtype, threads, runs = sys.argv[1:]
    print(json.dumps(main(int(rows), int(context), dtype, int(threads), int(runs))))
