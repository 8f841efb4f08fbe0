"""Attention as models have it: a step that decodes, and one with a prompt. Shared prefixes run the prompt's kernel."""

from functools import partial

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.triton_attention import Fp8Kv, TritonAttention, WorkCut
from services.engine.kernels.base import Scoring
from tests.gpu.checks.direct_staging import DirectStaging
from tests.gpu.compiled import Variant, of_launch

_META = torch.device("meta")
_MULTIPROCESSORS = 132  # an H200's
_SHAPES = {  # heads, kv_heads, head_dim
    "Llama-3-8B": (32, 8, 128),
    "OPT-125m": (12, 12, 64),
    "head_dim 256": (16, 8, 256),
}


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    found: list[Variant] = []
    for shape, sizes in _SHAPES.items():
        found += _of_shape(shape, sizes, torch.bfloat16)
    cap = partial(_attend, 16, 8, 256, torch.bfloat16, scored=True)
    found += of_launch("head_dim 256 with cap and sinks, single token,", lambda: cap(num_tokens=1))
    found += of_launch("head_dim 256 with cap and sinks, prompt", lambda: cap(num_tokens=1024))
    found += _of_shape("Llama-3-8B, float8", _SHAPES["Llama-3-8B"], torch.float8_e4m3fn)
    return found


def _of_shape(name: str, sizes: tuple[int, int, int], kv_dtype: torch.dtype) -> list[Variant]:
    """Collects the kernels of a decode step and of a prompt; the merge of partial results only for the first shape."""
    decode = of_launch(f"{name}, decode,", lambda: _attend(*sizes, kv_dtype, num_tokens=1))
    (prefill,) = of_launch(f"{name}, prefill", lambda: _attend(*sizes, kv_dtype, num_tokens=1024))
    return [*decode, prefill] if name == "Llama-3-8B" else [decode[0], prefill]


def _attend(
    num_heads: int, num_kv: int, head_dim: int, kv_dtype: torch.dtype, num_tokens: int, *, scored: bool = False
) -> None:
    """Attends in a step of one row with `num_tokens` tokens, the last ones of many: a few of them are split."""
    sinks = torch.empty(32, num_heads, device=_META)
    scoring = Scoring(head_dim**-0.5, 50.0, sinks) if scored else Scoring(head_dim**-0.5)
    layout = KvLayout(32, num_kv, head_dim, 16, str(kv_dtype).removeprefix("torch."))
    attention = TritonAttention(
        torch.empty(layout.shape(64), dtype=kv_dtype, device=_META),
        layout,
        num_heads,
        scoring,
        staging=DirectStaging(_META),
        cut=WorkCut(_MULTIPROCESSORS),
        fp8=None if kv_dtype == torch.bfloat16 else Fp8Kv(torch.empty(32, 2, num_kv, device=_META), torch.bfloat16),
    )
    length = 16_384 if num_tokens == 1 else num_tokens
    queries = PagedQueries(
        np.array([0, num_tokens], dtype=np.int32),
        np.array([length], dtype=np.int32),
        np.zeros((1, length // 16), dtype=np.int32),
    )
    plan = attention.prepare(queries)
    qkv = torch.empty(num_tokens, num_heads + 2 * num_kv, head_dim, dtype=torch.bfloat16, device=_META)
    q, k, v = qkv.split((num_heads, num_kv, num_kv), dim=1)
    attention.attend(plan, 1, q, k, v)
