"""Attention of a decode step in one layer, over latents and over K and V of as many heads, by turns: a program that
prints one JSON object, for `loadtest.micro.latent`.

    PYTHONPATH=TREE python -P latent_attention.py ROWS CONTEXT DTYPE THREADS RUNS

It measures the services of that tree, so that two versions can be measured by turns; so it imports nothing of loadtest,
and torch only after the library of threads is loaded.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.engine.kernels.cpu.openmp import load_openmp, loaded_openmp

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.layout import KvLayout
    from services.engine.attention.base import PagedQueries

_BLOCK = 16
_HEADS, _HEAD_DIM = 16, 128  # of K and V
_RANK, _NOPE, _ROPE = 512, 128, 64  # of DeepSeek-V2-Lite


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of attention."""

    runs: dict[str, Callable[[], object]]  # parts by name
    keys: int  # that a step reads, as its plan says
    layout: "KvLayout"


@dataclass(frozen=True, slots=True)
class Step:
    """A step in which some rows decode, whose blocks lie scattered."""

    rows: int
    context: int
    dtype: str

    @property
    def queries(self) -> "PagedQueries":
        """Returns its tokens and block tables."""
        from services.engine.attention.base import PagedQueries

        width = -(-self.context // _BLOCK)
        tables = np.random.default_rng(0).permutation(self.rows * width).astype(np.int32).reshape(self.rows, width)
        starts = np.arange(self.rows + 1, dtype=np.int32)
        return PagedQueries(starts, np.full(self.rows, self.context, dtype=np.int32), tables)

    def pool(self, layout: "KvLayout") -> "Tensor":
        """Allocates blocks that are written: memory that never was is one page of zeros, which is always in a cache."""
        import torch

        from services.engine.kernels.cpu.huge_pages import allocate

        num_blocks = self.rows * -(-self.context // _BLOCK)
        memory = torch.from_numpy(allocate(num_blocks * layout.block_bytes)).view(getattr(torch, self.dtype))
        return memory.normal_().view(layout.shape(num_blocks))

    def some(self, *shape: int) -> "Tensor":
        """Draws numbers."""
        import torch

        return torch.randn(shape).to(getattr(torch, self.dtype))


def over_latents(step: Step) -> Kind:
    """Prepares attention in the absorbed form, with its products."""
    from kvtransfer.layout import KvLayout
    from services.engine.attention.latent import Latent
    from services.engine.attention.latent_cpu_attention import LatentCpuAttention
    from services.engine.models.head_linear import HeadLinear
    from services.engine.models.latent_products import KvProducts

    latent = Latent(_RANK, None, _NOPE, _ROPE, _HEAD_DIM, is_interleaved=True, score_factor=1.0)
    layout = KvLayout(1, 1, latent.width, _BLOCK, step.dtype, num_planes=1)
    attention = LatentCpuAttention(step.pool(layout), layout, _HEADS, latent, fused=True)
    absorb, values = (
        HeadLinear(step.some(_HEADS, out, depth) / depth**0.5, fused=True)
        for out, depth in ((_RANK, _NOPE), (_HEAD_DIM, _RANK))
    )
    products = KvProducts((), absorb, values)
    q_nope, q_rope, found = (step.some(step.rows, _HEADS, size) for size in (_NOPE, _ROPE, _RANK))
    plan = attention.prepare(step.queries)
    runs: dict[str, Callable[[], object]] = {
        "latent": lambda: attention.attend(plan, 0, q_nope, q_rope, products),
        "products of latent": lambda: (products.absorb(q_nope), products.values(found)),
    }
    tiles = plan.absorbed.passes
    ends = [each.limits[each.starts[1:].long() - 1] for each in tiles]
    return Kind(runs, sum(int((end - each.first_keys).sum()) for end, each in zip(ends, tiles, strict=True)), layout)


def over_heads(step: Step) -> Kind:
    """Prepares attention over K and V of all heads."""
    from kvtransfer.layout import KvLayout
    from services.engine.attention.cpu_attention import CpuAttention
    from services.engine.kernels.base import Scoring

    layout = KvLayout(1, _HEADS, _HEAD_DIM, _BLOCK, step.dtype)
    attention = CpuAttention(step.pool(layout), layout, _HEADS, Scoring(_HEAD_DIM**-0.5), fused=True)
    q, k = step.some(step.rows, _HEADS, _HEAD_DIM), step.some(step.rows, _HEADS, _HEAD_DIM)
    plan = attention.prepare(step.queries)
    singles = plan.work.values[0].singles
    assert singles is not None
    keys = int((singles.seq_lens - singles.first_keys).sum())
    return Kind({"dense": lambda: attention.attend(plan, 0, q, k, k)}, keys, layout)


def main(step: Step, threads: int, runs: int) -> dict[str, dict[str, float]]:
    """Returns for each part of each kind the median of its seconds; for a kind also the KV bytes that it reads as its
    plan says, and those that its rows have by the layout.
    """
    load_openmp()
    import torch

    torch.set_num_threads(threads)
    if (openmp := loaded_openmp()) is not None:
        openmp.set_num_threads(threads)
        openmp.spin()
    with torch.inference_mode():
        kinds = {"latent": over_latents(step), "dense": over_heads(step)}
        seconds = _by_turns({name: run for kind in kinds.values() for name, run in kind.runs.items()}, runs)
    found = {name: {"s": taken} for name, taken in seconds.items()}
    for name, kind in kinds.items():
        token_bytes = kind.layout.token_bytes
        found[name] |= {"read_bytes": kind.keys * token_bytes, "layout_bytes": step.rows * step.context * token_bytes}
    return found


def _by_turns(kinds: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Returns the median seconds of each: one run of each after the other, so often."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 + runs):
        for name, run in kinds.items():
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    return {name: float(np.median(times[1:])) for name, times in taken.items()}


if __name__ == "__main__":
    rows, context, dtype, threads, runs = sys.argv[1:]
    print(json.dumps(main(Step(int(rows), int(context), dtype), int(threads), int(runs))))
