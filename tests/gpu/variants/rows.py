"""Kernels over rows, the rotation and the KV write as Llama 3 8B has them, and some other widths of rows and heads."""

import torch
from torch import Tensor

from services.engine.kernels.gpu import rotary, rows
from tests.gpu.compiled import Variant, of_launch

_FLOAT8 = torch.float8_e4m3fn
_ALL = (80, 90)
_TOKENS = 7


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    x, wide, widest = _empty(_TOKENS, 4096), _empty(_TOKENS, 16384), _empty(_TOKENS, 28672)
    gate_up, activated = _empty(_TOKENS, 28672), _empty(_TOKENS, 14336)
    ids = _empty(_TOKENS, dtype=torch.int32)
    return [
        *of_launch("add_norm 4096", lambda: rows.norm_into(x, x, x[0], 1e-5, x), _ALL),
        *of_launch("add_norm 16384", lambda: rows.norm_into(wide, wide, wide[0], 1e-5, wide)),
        *of_launch("add_norm 4096, factor", lambda: rows.norm_into(x, x, x[0], 1e-5, x, 0.22)),
        *of_launch("add_normed 4096", lambda: rows.add_normed(x, x, x[0], 1e-5)),
        *of_launch("add_normed 4096, in place", lambda: rows.add_normed(None, x, x[0], 1e-5)),
        *of_launch("silu_mul 14336", lambda: rows.gated_into(gate_up, activated, gelu=False)),
        *of_launch("gelu_mul 14336", lambda: rows.gated_into(gate_up, activated, gelu=True)),
        *of_launch("quantize_rows 4096", lambda: rows.quantize_rows(x)),
        *of_launch("quantize_rows 28672", lambda: rows.quantize_rows(widest)),
        *of_launch("fill_tokens", lambda: rows.fill_tokens(ids, ids)),
        *of_launch("rotate_and_store 128", lambda: _rotate_and_store(128, 32, 8), _ALL),
        *of_launch("rotate_and_store 128, norm", lambda: _rotate_and_store(128, 32, 8, norm=True)),
        *of_launch("rotate_and_store 128, of which 96 turn", lambda: _rotate_and_store(128, 24, 8, turned=96)),
        *of_launch("rotate_and_store 128, float8", lambda: _rotate_and_store(128, 32, 8, dtype=_FLOAT8)),
        *of_launch("rotate_and_store 80", lambda: _rotate_and_store(80, 32, 32)),
        *of_launch("rotate_and_store 256", lambda: _rotate_and_store(256, 16, 8)),
        *of_launch("store_kv 128", lambda: _store_kv(128, 32)),
        *of_launch("store_kv 64, float8", lambda: _store_kv(64, 12, dtype=_FLOAT8)),
    ]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _paged(head_dim: int, num_kv: int, dtype: torch.dtype) -> rotary.PagedKv:
    scales = _empty(32, 2, num_kv, dtype=torch.float32) if dtype == _FLOAT8 else None
    return rotary.PagedKv(_empty(64, num_kv, 32, 2, 16, head_dim, dtype=dtype), scales)


def _rotate_and_store(
    head_dim: int,
    num_heads: int,
    num_kv: int,
    *,
    norm: bool = False,
    turned: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    heads, cos = _empty(_TOKENS, num_heads + 2 * num_kv, head_dim), _empty(_TOKENS, 1, turned or head_dim)
    weight = _empty(num_heads + num_kv, head_dim) if norm else None
    kv, offsets = _paged(head_dim, num_kv, dtype), _empty(_TOKENS, dtype=torch.int64)
    rotary.rotate_and_store(heads, (cos, cos), weight, 1e-5, kv=kv, layer=1, offsets=offsets)


def _store_kv(head_dim: int, num_kv: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    qkv, offsets = _empty(_TOKENS, 3, num_kv, head_dim), _empty(_TOKENS, dtype=torch.int64)
    rotary.store_kv(qkv[:, 1], qkv[:, 2], kv=_paged(head_dim, num_kv, dtype), layer=1, offsets=offsets)
