"""One step of paged attention with all its tensors, and its result in float64.

A pool's blocks are scattered, and elements that no row has written are NaN. Old tokens are put into the pool directly,
new ones through `write`; with a pool in FP8 the reference uses the rounded values, so the bounds are those of the
arithmetic.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import Windows
from services.engine.attention.triton_attention import Fp8Kv, TritonAttention, TritonPlan, WorkCut
from services.engine.kernels.base import Scoring
from services.engine.kernels.gpu.paged_attention import Outputs
from tests.gpu.checks.direct_staging import DirectStaging

FP8_MAX = 448.0
_GUARD = 4096  # elements before and behind an output


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: rows of seq_lens tokens, the last counts of which are new."""

    seq_lens: tuple[int, ...]
    counts: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    num_layers: int = 2
    window: Windows = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    split_keys: int | None = None
    padded_rows: int | None = None
    num_multiprocessors: int = 8
    shared: tuple[tuple[int, int, int], ...] = ()  # rows from, to: as many first tokens are the first one's
    seed: int = 0

    def window_of(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.window[layer] if isinstance(self.window, tuple) else self.window

    @property
    def name(self) -> str:
        """The case's properties, in short."""
        kind = f"{str(self.dtype).removeprefix('torch.')}{' fp8' * self.fp8}"
        shape = f"{self.num_kv_heads}x{self.group} heads of {self.head_dim}, blocks of {self.block_size}"
        options = [
            f"{name} {value}"
            for name in ("window", "softcap", "sinks", "split_keys", "padded_rows", "shared")
            if (value := getattr(self, name))
        ]
        rows = f"{len(self.seq_lens)} rows, {sum(self.counts)} of {sum(self.seq_lens)} tokens"
        return f"attention, {kind}, {shape}, {rows}, seed {self.seed}" + "".join(f", {option}" for option in options)


@dataclass(slots=True)
class Step:
    """A case's tensors on a device."""

    case: Case
    device: torch.device
    layout: KvLayout = field(init=False)
    pool: Tensor = field(init=False)
    tables: np.ndarray = field(init=False)  # int32[R, B]
    kv: list[Tensor] = field(init=False)  # of each row, on the CPU: [layers, 2, tokens, kv_heads, head_dim]
    scales: Tensor | None = field(init=False)
    num_strays: int = field(init=False, default=0)  # elements written for padding, or outside of the outputs
    q: Tensor = field(init=False)  # [layers, T, heads, head_dim]: a part of a wider product, with NaN around it

    def __post_init__(self) -> None:
        case = self.case
        generator = torch.Generator().manual_seed(case.seed)
        name = str(case.dtype).removeprefix("torch.")
        self.layout = KvLayout(case.num_layers, case.num_kv_heads, case.head_dim, case.block_size, name)
        self._place_blocks()
        shape = (case.num_layers, 2, 1, case.num_kv_heads, 1)
        scales = torch.rand(shape, generator=generator) * 0.02 + 0.005 if case.fp8 else torch.ones(shape)
        self.scales = scales[:, :, 0, :, 0].contiguous().to(self.device) if case.fp8 else None
        self._make_kv(generator)
        self._fill_pool(scales)
        self._remove_hidden_blocks()
        self._make_queries(generator)

    @property
    def queries(self) -> PagedQueries:
        """The step's queries."""
        starts = np.cumsum([0, *self.case.counts], dtype=np.int32)
        return PagedQueries(starts, np.array(self.case.seq_lens, np.int32), self.tables)

    def attention(self) -> TritonAttention:
        """The backend over the pool."""
        case = self.case
        return TritonAttention(
            self.pool,
            self.layout,
            case.num_kv_heads * case.group,
            self.scoring,
            staging=DirectStaging(self.device),
            cut=WorkCut(case.num_multiprocessors, case.split_keys),
            fp8=None if self.scales is None else Fp8Kv(self.scales, case.dtype),
        )

    @property
    def scoring(self) -> Scoring:
        """The backend's; sinks are about as large as scores."""
        case, sinks = self.case, None
        if case.sinks:
            shape = case.num_layers, case.num_kv_heads * case.group
            sinks = torch.randn(shape, generator=torch.Generator().manual_seed(case.seed)).to(self.device)
        return Scoring(case.head_dim**-0.5, case.softcap, sinks)

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the new tokens' K and V, parts of a wider product, with NaN for padding."""
        case = self.case
        new = [kv[layer, :, kv.shape[2] - count :] for kv, count in zip(self.kv, case.counts, strict=True)]
        num_tokens = case.padded_rows or sum(case.counts)
        wide = torch.full((num_tokens, 2, case.num_kv_heads, case.head_dim), math.nan, dtype=case.dtype)
        wide[: sum(case.counts)] = torch.cat(new, dim=1).transpose(0, 1).to(case.dtype)
        moved = wide.to(self.device)
        return moved[:, 0], moved[:, 1]

    def plan(self, attention: TritonAttention) -> TritonPlan:
        """Plans the step: as one that is replayed, where the case has padded_rows."""
        case = self.case
        if case.padded_rows is None:
            return attention.prepare(self.queries, case.window)
        return attention.prepare_recorded(self.queries, case.padded_rows, case.window)

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Runs the step, and returns output and log-sum-exp of each layer, of the real tokens."""
        attention = self.attention()
        plan = self.plan(attention)
        wide, outputs = _guarded(plan.outputs)
        plan = replace(plan, outputs=outputs)
        num_tokens = sum(self.case.counts)
        results = []
        for layer in range(self.case.num_layers):
            for tensor in wide:
                tensor.fill_(math.nan)
            k, v = self.new_kv(layer)
            attention.write(plan, layer, k, v)
            out, lse = attention.attend(plan, layer, self.q[layer], k, v)
            results.append((out[:num_tokens].clone(), lse[:num_tokens].clone()))
            out[:num_tokens] = lse[:num_tokens] = math.nan
            for tensor in wide[:2]:
                self.num_strays += int((~tensor.isnan()).sum())
            for tensor in wide[2:]:
                self.num_strays += int((~tensor[:_GUARD].isnan()).sum() + (~tensor[-_GUARD:].isnan()).sum())
        return results

    def expected(self, layer: int) -> tuple[Tensor, Tensor]:
        """Computes output and log-sum-exp of a layer row by row, in float64."""
        outs, lses = [], []
        ends = np.cumsum(self.case.counts)
        q = self.q[layer].double()
        for kv, count, end in zip(self.kv, self.case.counts, ends, strict=True):
            keys, values = kv[layer].to(self.device).double().repeat_interleave(self.case.group, dim=2)
            length = len(keys)
            scores = torch.einsum("qhd,khd->hqk", q[end - count : end], keys) * self.case.head_dim**-0.5
            places = torch.arange(length, device=self.device)
            behind = places[length - count :, None] - places
            hidden = (behind < 0) | (behind >= (self.case.window_of(layer) or length))
            if self.case.softcap is not None:
                scores = self.case.softcap * (scores / self.case.softcap).tanh()
            scores = scores.masked_fill(hidden, -math.inf)
            if (sinks := self.scoring.sinks) is not None:  # a key without a value
                sink = sinks[layer].double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat((scores, sink), dim=-1)
                values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            lses.append(scores.logsumexp(-1).T)
        return torch.cat(outs), torch.cat(lses)

    def _make_kv(self, generator: torch.Generator) -> None:
        case = self.case
        self.kv = []
        for row, length in enumerate(case.seq_lens):
            shape = (case.num_layers, 2, length, case.num_kv_heads, case.head_dim)
            kv = torch.randn(shape, generator=generator).to(case.dtype)
            for first, last, tokens in case.shared:
                if first < row < last:
                    kv[:, :, :tokens] = self.kv[first][:, :, :tokens]
            self.kv.append(kv)

    def _fill_pool(self, scales: Tensor) -> None:
        """Fills the pool with the rows' old tokens. In FP8 the reference gets rounded values, also of new tokens."""
        case = self.case
        dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
        pool = torch.full(self.layout.shape(int(self.tables.max()) + 1), math.nan).to(dtype)
        raw = torch.uint8 if case.fp8 else dtype  # torch does not index float8
        for table, kv, count in zip(self.tables, self.kv, case.counts, strict=True):
            at = torch.arange(kv.shape[2] - count)
            blocks = torch.from_numpy(table.astype(np.int64))[at // case.block_size]
            old = kv[:, :, : len(at)]
            stored = (_to_fp8(old, scales) if case.fp8 else old).permute(2, 3, 0, 1, 4)
            pool.view(raw)[blocks, :, :, :, at % case.block_size] = stored.contiguous().view(raw)
        if case.fp8:
            self.kv = [_to_fp8(kv, scales).float() * scales for kv in self.kv]
        self.pool = pool.to(self.device)

    def _make_queries(self, generator: torch.Generator) -> None:
        case = self.case
        heads, num_tokens = case.num_kv_heads * case.group, sum(case.counts)
        shape = (case.num_layers, case.padded_rows or num_tokens, heads + 3, case.head_dim)
        wide = torch.full(shape, math.nan, dtype=case.dtype)
        q = torch.randn((case.num_layers, num_tokens, heads, case.head_dim), generator=generator)
        wide[:, :num_tokens, 1 : heads + 1] = q.to(case.dtype)
        self.q = wide.to(self.device)[:, :, 1 : heads + 1]

    def _remove_hidden_blocks(self) -> None:
        """Takes blocks out of the tables that no query sees because of the window."""
        for row, (length, count) in enumerate(zip(self.case.seq_lens, self.case.counts, strict=True)):
            widest = max(self.case.window_of(layer) or length for layer in range(self.case.num_layers))
            first_key = length - count + 1 - widest
            self.tables[row, : max(first_key, 0) // self.case.block_size] = 0

    def _place_blocks(self) -> None:
        """Gives rows their blocks in random order, and block 0, which no row has, behind the end of each."""
        case = self.case
        needed = [-(-length // case.block_size) for length in case.seq_lens]
        ids = np.random.default_rng(case.seed).permutation(sum(needed)) + 1
        self.tables = np.zeros((len(needed), max(needed) + 2), np.int32)
        for row, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
            self.tables[row, :count] = ids[end - count : end]
        for first, last, tokens in case.shared:
            self.tables[first + 1 : last, : tokens // case.block_size] = self.tables[first, : tokens // case.block_size]


def _guarded(outputs: Outputs) -> tuple[list[Tensor], Outputs]:
    """Makes a larger buffer for each output, and returns them with the outputs in their middle."""
    tensors = outputs.out, outputs.lse, outputs.partial_out, outputs.partial_lse
    wide = [tensor.new_empty(tensor.numel() + 2 * _GUARD) for tensor in tensors]
    return wide, Outputs(*(a[_GUARD:-_GUARD].view(b.shape) for a, b in zip(wide, tensors, strict=True)))


def _to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
