"""`Operations` and paged attention as kernels that numba compiles: each reads and writes its tensors once.

Kernels are compiled when a runner is made, in some seconds for each dtype and shape of heads, or loaded as an earlier
process stored them (see `compiled`).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.kernels.base import BlockSizes, CodedKv, Rows, Scoring, Singles, Tiles
from services.engine.kernels.cpu import small
from services.engine.kernels.cpu.amx import decode_attention as amx_decode
from services.engine.kernels.cpu.amx.decode_attention import AmxDecodeAttention
from services.engine.kernels.cpu.decode_attention import DecodeAttention
from services.engine.kernels.cpu.exponential import LOG2_E
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.kv_forms import KvForm, form_of
from services.engine.kernels.cpu.store_codes import make_store_codes
from services.engine.kernels.cpu.team import Kernel, float_argument, the_team
from services.engine.kernels.cpu.tile_attention import TileAttentionKernel

T = TypeVar("T")

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class FusedOperations:
    """`Operations` by compiled kernels, for the dtypes of `elements.ELEMENTS`."""

    def __init__(self, dtype: str, blocks: BlockSizes | None = None) -> None:
        """blocks: into which `by_rows` cuts rows; None: those that suit its arguments, and the threads that run."""
        self._team = the_team()
        self._blocks = blocks
        self._add_norm = _compiled("make_add_norm", dtype, wide=False)
        self._add_normed = _compiled("make_add_normed", dtype)
        self._rotate = _compiled("make_rotate", dtype, wide=False)
        self._silu_mul = _compiled("make_gated", dtype, activation="silu")
        self._dtype = dtype
        self._mask = {_DTYPES[of]: _compiled("make_mask", of) for of in (dtype, "float32")}

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """See `Operations.by_rows`."""
        return self._team.by_rows(num_rows, row_bytes, body, self._blocks)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.norm`."""
        return self._norm(x, None, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """See `Operations.add_norm`."""
        return self._norm(x, y, weight, eps, factor)

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.add_normed`."""
        self._norm_of(x.data_ptr(), y, weight, eps)

    def norm_in_place(self, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.norm_in_place`."""
        self._norm_of(0, y, weight, eps)

    def _norm_of(self, x: int, y: Tensor, weight: Tensor, eps: float) -> None:
        rows, width = y.shape
        arguments = x, y.data_ptr(), y.stride(0), weight.data_ptr(), width, float_argument(eps)
        self._team.run(self._add_normed, rows, *arguments)

    def _norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        rows, width = x.shape
        out = self._team.empty(rows, width, x.dtype)
        self._team.run(
            self._add_norm if weight.dtype == x.dtype else _compiled("make_add_norm", self._dtype, wide=True),
            rows,
            x.data_ptr(),
            x.stride(0),
            0 if y is None else y.data_ptr(),
            0 if y is None else y.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            width,
            float_argument(eps),
            float_argument(factor),
        )
        return out

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """See `Operations.replay`."""
        return self._team.replay(key, inputs, body)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """See `Operations.rotate`."""
        tokens, count, head_dim = heads.shape
        is_wide = weight is not None and weight.dtype != heads.dtype
        self._team.run(
            _compiled("make_rotate", self._dtype, wide=True) if is_wide else self._rotate,
            tokens,
            heads.data_ptr(),
            heads.stride(0),
            count,
            head_dim,
            cos.shape[-1],
            cos.data_ptr(),
            signed_sin.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            float_argument(eps),
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.silu_mul`."""
        return self._gated(self._silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.gelu_mul`."""
        return self._gated(_compiled("make_gated", self._dtype, activation="gelu"), gate_up)

    def _gated(self, kernel: Kernel, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = self._team.empty(rows, width, gate_up.dtype)
        self._team.run(kernel, rows, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0), width)
        return out

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See `HostOperations.mask`."""
        self._team.run(
            self._mask[logits.dtype],
            len(rows),
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.data_ptr(),
            bits.data_ptr(),
            bits.shape[1],
            at_a_time=1,
        )


class _ScoringArguments:
    """A `Scoring` as kernels take it: scale and cap in powers of two, address of the layer's sinks; 0 for none."""

    def __init__(self, scoring: Scoring) -> None:
        self._numbers = [float_argument(number * LOG2_E) for number in (scoring.scale, scoring.softcap or 0.0)]
        assert scoring.sinks is None or scoring.sinks.is_contiguous()
        self._kept = scoring.sinks
        self._sinks = None if scoring.sinks is None else (scoring.sinks.data_ptr(), scoring.sinks.shape[1] * 4)

    def of_layer(self, layer: int) -> tuple[int, ...]:
        """Returns the kernels' arguments scale, cap and sinks."""
        return (*self._numbers, 0 if self._sinks is None else self._sinks[0] + layer * self._sinks[1])


class _StaticScales:
    """Static scales of K and V as kernels take them."""

    def __init__(self, coded: CodedKv | None) -> None:
        self._scales = None if coded is None else coded.scales
        assert self._scales is None or self._scales.is_contiguous()

    def of_layer(self, layer: int) -> int:
        """Returns the address of the layer's scales; 0: there are none."""
        return 0 if self._scales is None else self._scales[layer].data_ptr()


class PagedKernels:
    """`Paged` by compiled kernels."""

    def __init__(
        self, pool: Tensor, layout: KvLayout, group: int, scoring: Scoring, coded: CodedKv | None = None
    ) -> None:
        self._team = the_team()
        self._pool = pool
        self._layout = layout
        self._scoring = _ScoringArguments(scoring)
        self._kv_scales = _StaticScales(coded)
        dtype, form = _dtype_of(layout, coded), form_of(layout)
        self._is_coded = form.is_coded
        self._store = _compiled_store(dtype, form) if form.is_coded else _compiled("make_store_kv", dtype)
        by_amx = _decodes_by_amx(layout, group)
        shape = dtype, layout.head_dim, group, layout.block_size
        self._attention = _compiled_decode(*shape, form, capped=scoring.softcap is not None, by_amx=by_amx)
        self._scratch = np.empty(self._team.max_threads * self._attention.scratch_bytes + 64, dtype=np.uint8)

    def store(self, layer: int, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """See `Paged.store`."""
        layout, pool = self._layout, self._pool
        of_codes = (pool.stride(0), layout.block_size, self._kv_scales.of_layer(layer)) if self._is_coded else ()
        self._team.run(
            self._store,
            len(k),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            layout.num_kv_heads,
            layout.head_dim,
            _at_layer(pool, layout, layer),
            offsets.data_ptr(),
            pool.stride(1),
            layout.plane_bytes // pool.itemsize,
            *of_codes,
        )

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, singles: Singles) -> None:
        """See `Paged.attend`."""
        layout, pool = self._layout, self._pool
        self._team.run(
            self._attention.kernel,
            len(singles.tokens) * layout.num_kv_heads,
            layout.num_kv_heads,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            lse.data_ptr(),
            singles.tokens.data_ptr(),
            _at_layer(pool, layout, layer),
            pool.stride(0),
            pool.stride(1),
            singles.tables.data_ptr(),
            singles.tables.stride(0),
            singles.first_keys.data_ptr(),
            singles.seq_lens.data_ptr(),
            int(singles.begun),
            *self._scoring.of_layer(layer),
            self._attention.config.ctypes.data,
            _on_border(self._scratch),
            self._kv_scales.of_layer(layer),
        )


class _TileKernel:
    """The tile kernel over one pool, with the arguments that are the same in each call."""

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        attention: TileAttentionKernel,
        scoring: Scoring,
        coded: CodedKv | None = None,
    ) -> None:
        self._team = the_team()
        self._pool = pool
        self._layout = layout
        self._attention = attention
        self._scoring = _ScoringArguments(scoring)
        self._kv_scales = _StaticScales(coded)
        self._scratch = np.empty(self._team.max_threads * attention.scratch_bytes + 64, dtype=np.uint8)

    def attend(
        self,
        layer: int,
        q: Tensor,
        outputs: tuple[Tensor, Tensor],
        tiles: Tiles,
        tables: Tensor,
        rope: Tensor | None = None,
        at_a_time: int | None = None,
    ) -> None:
        """Runs the kernel for all tiles and KV heads. outputs: out and lse. rope: of latents, the rotated part of q."""
        layout, pool, (out, lse) = self._layout, self._pool, outputs
        self._team.run(
            self._attention.kernel,
            len(tiles.rows) * layout.num_kv_heads,
            layout.num_kv_heads,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            lse.data_ptr(),
            tiles.tokens.data_ptr(),
            tiles.limits.data_ptr(),
            tiles.starts.data_ptr(),
            tiles.rows.data_ptr(),
            tiles.first_keys.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            _at_layer(pool, layout, layer),
            pool.stride(0),
            pool.stride(1),
            int(tiles.begun),
            tiles.window,
            *self._scoring.of_layer(layer),
            self._attention.config.ctypes.data,
            _on_border(self._scratch),
            0 if rope is None else rope.data_ptr(),
            0 if rope is None else rope.stride(0),
            self._kv_scales.of_layer(layer),
            at_a_time=at_a_time,
        )


class PagedTileKernels:
    """`PagedTiles` by a compiled kernel."""

    def __init__(
        self, pool: Tensor, layout: KvLayout, group: int, scoring: Scoring, coded: CodedKv | None = None
    ) -> None:
        shape = _dtype_of(layout, coded), layout.head_dim, group, layout.block_size
        attention = _compiled_tiles(*shape, capped=scoring.softcap is not None, form=form_of(layout))
        self._tiles = _TileKernel(pool, layout, attention, scoring, coded)
        self.max_tokens = attention.max_tokens

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, tables: Tensor) -> None:
        """Computes the tiles, as `PagedTiles.attend` says."""
        self._tiles.attend(layer, q, (out, lse), tiles, tables)


class LatentKernels:
    """`LatentPaged` by compiled kernels."""

    def __init__(self, pool: Tensor, layout: KvLayout, num_heads: int, rope_dim: int, scale: float) -> None:
        self._team = the_team()
        self._pool = pool
        self._layout = layout
        self._rank, self._rope_dim = layout.head_dim - rope_dim, rope_dim
        self._store = _compiled("make_store_latent", layout.dtype)
        attention = _compiled_tiles(layout.dtype, self._rank, num_heads, layout.block_size, rope_dim)
        self._tiles = _TileKernel(pool, layout, attention, Scoring(scale))
        self.max_tokens = attention.max_tokens

    def store(
        self, layer: int, offsets: Tensor, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor, eps: float
    ) -> None:
        """See `LatentPaged.store`."""
        cos, signed_sin = turn
        self._team.run(
            self._store,
            len(kv),
            kv.data_ptr(),
            kv.stride(0),
            self._rank,
            self._rope_dim,
            cos.data_ptr(),
            signed_sin.data_ptr(),
            norm.data_ptr(),
            float_argument(eps),
            _at_layer(self._pool, self._layout, layer),
            offsets.data_ptr(),
        )

    def attend(
        self,
        layer: int,
        queries: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, Tensor],
        passes: Sequence[Tiles],
        tables: Tensor,
    ) -> None:
        """See `LatentPaged.attend`."""
        for tiles in passes:
            self._tiles.attend(layer, queries[0], outputs, tiles, tables, queries[1], at_a_time=1)


def _decodes_by_amx(layout: KvLayout, group: int) -> bool:
    fits = layout.head_dim % 32 == 0 and layout.block_size % 16 == 0 and group <= amx_decode.MAX_GROUP
    return layout.dtype == "bfloat16" and fits and ISA.has_amx


def _on_border(scratch: np.ndarray) -> int:
    """Returns the address of the first cache line that begins inside the scratch memory."""
    return -(-scratch.ctypes.data // 64) * 64


def _at_layer(pool: Tensor, layout: KvLayout, layer: int) -> int:
    """Returns the address of the layer's K in the first head of the first block."""
    return pool.data_ptr() + layout.num_planes * layer * layout.plane_bytes


def _dtype_of(layout: KvLayout, coded: CodedKv | None) -> str:
    """Returns the dtype of the model over the pool."""
    return layout.dtype if coded is None else str(coded.dtype).removeprefix("torch.")


@cache
def _compiled(maker: str, dtype: str, **kind: str | bool) -> Kernel:
    return getattr(small, maker)(dtype, **kind)


@cache
def _compiled_store(dtype: str, form: KvForm) -> Kernel:
    return make_store_codes(dtype, form)


@cache
def _compiled_decode(
    dtype: str, head_dim: int, group: int, block_size: int, form: KvForm, *, capped: bool, by_amx: bool
) -> DecodeAttention:
    if by_amx:
        return AmxDecodeAttention(dtype, head_dim, group, block_size, capped=capped)
    return DecodeAttention(dtype, head_dim, group, block_size, capped=capped, form=form)


@cache
def _compiled_tiles(
    dtype: str,
    head_dim: int,
    group: int,
    block_size: int,
    rope_dim: int = 0,
    *,
    capped: bool = False,
    form: KvForm = KvForm.PLAIN,
) -> TileAttentionKernel:
    return TileAttentionKernel(dtype, head_dim, group, block_size, rope_dim, capped=capped, form=form)
