"""One layer's attention over latents, products with `kv_b` included, against the card's copy bandwidth and matrix rate.

Rows that decode read their latents and the two parts of `kv_b`; that is what `of_copy_bandwidth` counts. Prompts are in
the expanded form, which makes K and V of every key first; `of_matrix_rate` counts the products of the form that a row
takes, those of hidden keys left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from loadtest.gpu.card import Card, kernel_s
from loadtest.gpu.shapes import BLOCK_SIZE
from loadtest.tables import Record
from services.engine.attention.base import PagedQueries
from services.engine.attention.latent import Latent
from services.engine.attention.latent_triton_attention import LatentTritonAttention
from services.engine.attention.triton_attention import WorkCut
from services.engine.models.latent_products import make_products
from services.engine.runner.gpu.device import Device
from services.engine.runner.gpu.step_buffer import StepBuffer

DEEPSEEK = Latent(
    kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, is_interleaved=True, score_factor=1.0
)
_MOST_KEYS = 8192  # that are expanded at once


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a published model."""

    name: str
    num_heads: int
    latent: Latent = DEEPSEEK


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows with so many new tokens each, the last ones of a context."""

    rows: int
    tokens: int
    context: int


SHAPES = (Shape("DeepSeek-V2-Lite", 16), Shape("DeepSeek-V3", 128))
CELLS = (
    Cell(64, 1, 4096),
    Cell(256, 1, 4096),
    Cell(1, 1, 32_768),
    Cell(8, 1, 32_768),
    Cell(1, 8192, 8192),
    Cell(1, 2048, 2048),
    Cell(1, 2048, 32_768),
    Cell(8, 64, 4096),
)


def measure(
    card: Card,
    device: Device,
    shapes: Sequence[Shape] = SHAPES,
    cells: Sequence[Cell] = CELLS,
    seconds_of: Callable[[Callable[[], object]], float] = kernel_s,
) -> Iterator[Record]:
    """Yields a record for each shape and cell."""
    with torch.inference_mode():
        for shape in shapes:
            for cell in cells:
                yield _record(card, device, shape, cell, seconds_of)


def _record(
    card: Card, device: Device, shape: Shape, cell: Cell, seconds_of: Callable[[Callable[[], object]], float]
) -> Record:
    latent, heads = shape.latent, shape.num_heads
    attention, queries = _attention(card, device, shape, cell), _queries(cell)
    weight = _normal(device.torch, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    products = make_products(weight * latent.kv_rank**-0.5, heads, latent, fused=False)
    q = _normal(device.torch, cell.rows * cell.tokens, heads * latent.query_dim)
    nope, rope = q.split((heads * latent.nope_dim, heads * latent.rope_dim), dim=1)
    of_heads = nope.unflatten(1, (heads, -1)), rope.unflatten(1, (heads, -1))
    plan = attention.prepare(queries)
    taken = seconds_of(lambda: attention.attend(plan, 0, *of_heads, products))
    read = (cell.rows * cell.context * latent.width + weight.numel()) * q.itemsize
    return {
        "shape": shape.name,
        "rows": cell.rows,
        "tokens": cell.tokens,
        "context": cell.context,
        "form": "expanded" if plan.pieces else "absorbed",
        "us": taken * 1e6,
        "of_copy_bandwidth": read / taken / card.bytes_per_s,
        "of_matrix_rate": operations(shape, cell, expanded=bool(plan.pieces)) / taken / card.flops_per_s,
    }


def operations(shape: Shape, cell: Cell, *, expanded: bool) -> float:
    """Counts operations of a layer's attention: 2 for each number and number that are multiplied."""
    latent, keys, new = shape.latent, cell.rows * cell.context, cell.rows * cell.tokens
    seen = cell.rows * (cell.tokens * cell.context - cell.tokens * (cell.tokens - 1) // 2)
    through_kv_b = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    if expanded:
        return 2.0 * shape.num_heads * (keys * through_kv_b + seen * (latent.query_dim + latent.value_dim))
    return 2.0 * shape.num_heads * (new * through_kv_b + seen * (latent.width + latent.kv_rank))


def _attention(card: Card, device: Device, shape: Shape, cell: Cell) -> LatentTritonAttention:
    """Makes the attention over a pool of random numbers with room for one layer."""
    layout = KvLayout(1, 1, shape.latent.width, BLOCK_SIZE, "bfloat16", num_planes=1)
    return LatentTritonAttention(
        _normal(device.torch, *layout.shape(cell.rows * -(-cell.context // BLOCK_SIZE))),
        layout,
        shape.num_heads,
        shape.latent,
        staging=StepBuffer(device),
        cut=WorkCut(card.num_multiprocessors),
        most_keys=_MOST_KEYS,
    )


def _queries(cell: Cell) -> PagedQueries:
    tables = np.random.default_rng(0).permutation(cell.rows * -(-cell.context // BLOCK_SIZE))
    starts = np.arange(cell.rows + 1, dtype=np.int32) * cell.tokens
    lens = np.full(cell.rows, cell.context, dtype=np.int32)
    return PagedQueries(starts.astype(np.int32), lens, tables.astype(np.int32).reshape(cell.rows, -1))


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
