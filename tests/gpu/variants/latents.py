"""Attention over latents with the published sizes: DeepSeek-V2-Lite's 16 heads, and V2's and V3's 128."""

from functools import partial

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.latent import Latent
from services.engine.attention.latent_triton_attention import LatentTritonAttention
from services.engine.attention.triton_attention import WorkCut
from services.engine.models.latent_products import make_products
from tests.gpu.checks.direct_staging import DirectStaging
from tests.gpu.compiled import Variant, of_launch

_META = torch.device("meta")
_MULTIPROCESSORS = 132  # an H200's
_RANK, _NOPE, _ROPE, _VALUE = 512, 128, 64, 128
_LATENT = Latent(
    kv_rank=_RANK, q_rank=None, nope_dim=_NOPE, rope_dim=_ROPE, value_dim=_VALUE, is_interleaved=True, score_factor=1.0
)


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    found: list[Variant] = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for heads in (16, 128):
            decode, *merge = of_launch(f"{heads} heads, {name}, latents decode,", partial(_attend, heads, dtype, 1))
            found += [decode, *merge] if heads == 16 else [decode]
            found += of_launch(f"{heads} heads, {name}, latents chunk", partial(_attend, heads, dtype, 100))
        found += of_launch(f"{name}, latents expanded", partial(_attend, 16, dtype, 1024))
        found += of_launch(f"{name}, latents write", partial(_write, dtype))
    return found


def _attention(num_heads: int, dtype: torch.dtype) -> LatentTritonAttention:
    layout = KvLayout(27, 1, _RANK + _ROPE, 16, str(dtype).removeprefix("torch."), num_planes=1)
    pool = torch.empty(layout.shape(64), dtype=dtype, device=_META)
    return LatentTritonAttention(
        pool,
        layout,
        num_heads,
        _LATENT,
        staging=DirectStaging(_META),
        cut=WorkCut(_MULTIPROCESSORS),
        most_keys=8192,
    )


def _queries(num_tokens: int) -> PagedQueries:
    """Makes one row whose last tokens are new."""
    length = 16_384
    tables = np.zeros((1, length // 16), dtype=np.int32)
    return PagedQueries(np.array([0, num_tokens], np.int32), np.array([length], np.int32), tables)


def _attend(num_heads: int, dtype: torch.dtype, num_tokens: int) -> None:
    """Attends in a step of one row; more than 170 tokens are expanded."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    products = make_products(empty(num_heads * (_NOPE + _VALUE), _RANK), num_heads, _LATENT, fused=False)
    attention = _attention(num_heads, dtype)
    q = empty(num_tokens, num_heads * (_NOPE + _ROPE))
    nope, rope = (part.unflatten(1, (num_heads, -1)) for part in q.split((num_heads * _NOPE, num_heads * _ROPE), 1))
    attention.attend(attention.prepare(_queries(num_tokens)), 1, nope, rope, products)


def _write(dtype: torch.dtype) -> None:
    attention, num_tokens = _attention(16, dtype), 7
    kv = torch.empty(num_tokens, 16 * (_NOPE + _ROPE) + _RANK + _ROPE, dtype=dtype, device=_META)[:, -_RANK - _ROPE :]
    turn = torch.empty(num_tokens, 1, _ROPE, dtype=dtype, device=_META)
    plan = attention.prepare(_queries(num_tokens))
    attention.write(plan, 1, kv, (turn, turn), torch.empty(_RANK, dtype=dtype, device=_META))
