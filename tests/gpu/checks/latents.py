"""Attention over latents on random steps, in both forms, against the expanded form in float64.

A pool's blocks are scattered, and elements that no row has written are NaN. New rows go through `write`; the reference
for attention uses the rows that the pool then has, so the bounds are those of the arithmetic.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.latent import LATENT_NORM_EPS, Latent
from services.engine.attention.latent_triton_attention import LatentTritonAttention, LatentTritonPlan
from services.engine.attention.triton_attention import WorkCut
from services.engine.models.latent_products import KvProducts, make_products
from tests.gpu.checks.buffers import within
from tests.gpu.checks.direct_staging import DirectStaging
from tests.gpu.checks.errors import BOUNDS, compare
from tests.gpu.checks.result import Check

_LAYERS = 2
# The absorbed form rounds queries and what they find once more than the other.
_BOUNDS = {**BOUNDS, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: rows of seq_lens tokens, the last counts of which are new."""

    seq_lens: tuple[int, ...]
    counts: tuple[int, ...]
    num_heads: int = 4
    kv_rank: int = 32
    rope_dim: int = 16
    nope_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    least_expanded: float = math.inf  # new tokens of a row from which on it is expanded
    at_once: int = 64  # heads that are expanded at a time
    most_keys: int = 1 << 20  # that are expanded at a time
    split_keys: int | None = None
    padded_rows: int | None = None
    num_multiprocessors: int = 8
    shared: int = 0  # tokens that all rows have in common
    seed: int = 0

    @property
    def name(self) -> str:
        """The case's properties, in short."""
        sizes = f"{self.num_heads} heads over {self.kv_rank} + {self.rope_dim}"
        of_head = f"{self.nope_dim} and {self.value_dim} of a head, blocks of {self.block_size}"
        options = [
            f"{name} {value}"
            for name in ("least_expanded", "at_once", "most_keys", "split_keys", "padded_rows", "shared")
            if (value := getattr(self, name)) and value < 1 << 20
        ]
        rows = f"{len(self.seq_lens)} rows, {sum(self.counts)} of {sum(self.seq_lens)} tokens"
        kind = str(self.dtype).removeprefix("torch.")
        return f"latents, {kind}, {sizes}, {of_head}, {rows}, seed {self.seed}" + "".join(f", {o}" for o in options)

    @property
    def latent(self) -> Latent:
        """The numbers of the attention."""
        return Latent(
            kv_rank=self.kv_rank,
            q_rank=None,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            is_interleaved=False,
            score_factor=1.3,
        )


@dataclass(slots=True)
class Step:
    """A case's tensors on a device, and its parts of both layers."""

    case: Case
    device: torch.device
    layout: KvLayout = field(init=False)
    pool: Tensor = field(init=False)
    queries: PagedQueries = field(init=False)
    places: list[Tensor] = field(init=False)  # of each row's tokens, in layer 0: rows of the pool, int64
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.generator = torch.Generator().manual_seed(case.seed)
        width, name = case.kv_rank + case.rope_dim, str(case.dtype).removeprefix("torch.")
        self.layout = KvLayout(_LAYERS, 1, width, case.block_size, name, num_planes=1)
        self._place()
        self.pool = torch.full(self.layout.shape(int(self.queries.block_tables.max()) + 1), math.nan, dtype=case.dtype)
        rows = self.pool.view(-1, width)
        for row, (length, count) in enumerate(zip(case.seq_lens, case.counts, strict=True)):
            own = 0 if row == 0 else min(case.shared, length)
            for layer in range(_LAYERS):
                to = self.places[row][own : length - count] + layer * case.block_size
                rows[to] = self._normal(len(to), width).to(case.dtype)
        self.pool = self.pool.to(self.device)

    def attention(self) -> LatentTritonAttention:
        """The backend over the pool."""
        case = self.case
        attention = LatentTritonAttention(
            self.pool,
            self.layout,
            case.num_heads,
            case.latent,
            staging=DirectStaging(self.device),
            cut=WorkCut(case.num_multiprocessors, case.split_keys),
            most_keys=case.most_keys,
        )
        attention._least_expanded = case.least_expanded
        return attention

    def plan(self, attention: LatentTritonAttention) -> LatentTritonPlan:
        """Plans the step: as one that is replayed, where the case has padded_rows."""
        if self.case.padded_rows is None:
            return attention.prepare(self.queries)
        return attention.prepare_recorded(self.queries, self.case.padded_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens with padding."""
        return self.case.padded_rows or sum(self.case.counts)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Makes kv and all heads' q_nope and q_rope of the tokens, parts of wider products, with NaN for padding."""
        case = self.case
        sizes = case.rope_dim + case.kv_rank, case.num_heads * case.nope_dim, case.num_heads * case.rope_dim
        wide = torch.full((self.num_tokens, sum(sizes)), math.nan, dtype=case.dtype)
        wide[: sum(case.counts)] = self._normal(sum(case.counts), sum(sizes)).to(case.dtype)
        kv, nope, rope = wide.to(self.device).split(sizes, dim=1)
        return kv, nope.unflatten(1, (case.num_heads, -1)), rope.unflatten(1, (case.num_heads, -1))

    def turn(self) -> tuple[Tensor, Tensor]:
        """Makes cosine and signed sine of the tokens, [T, 1, rope_dim]: any angles."""
        angles = self._normal(self.num_tokens, 1, self.case.rope_dim // 2) * 3
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return both[0].to(self.device, self.case.dtype), both[1].to(self.device, self.case.dtype)

    def vector(self, size: int) -> Tensor:
        """Makes a norm's weight."""
        return within((1 + 0.2 * self._normal(size)).to(self.device, self.case.dtype))

    def kv_b(self) -> Tensor:
        """Makes kv_b's weight, [heads, nope_dim + value_dim, kv_rank]."""
        case = self.case
        weight = self._normal(case.num_heads, case.nope_dim + case.value_dim, case.kv_rank) * case.kv_rank**-0.5
        return weight.to(self.device, case.dtype)

    def products(self, kv_b: Tensor) -> KvProducts:
        """Makes the products with kv_b as models have them."""
        case = self.case
        columns = case.at_once * kv_b.shape[1]
        return make_products(kv_b.flatten(0, 1), case.num_heads, case.latent, fused=False, most_columns=columns)

    def expected_rows(self, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor) -> Tensor:
        """Computes the rows of the new tokens, in float64."""
        rope_dim = self.case.rope_dim
        rope, latent = kv.double().split((rope_dim, self.case.kv_rank), dim=1)
        latent = latent * (latent.square().mean(dim=1, keepdim=True) + LATENT_NORM_EPS).rsqrt() * norm.double()
        cos, sin = (part[:, 0].double() for part in turn)
        turned = rope * cos + rope.roll(rope_dim // 2, dims=1) * sin
        return torch.cat((latent, turned), dim=1)

    def rows(self, row: int, layer: int) -> Tensor:
        """Reads what the pool has of a row, in float64."""
        at = self.places[row].to(self.device) + layer * self.case.block_size
        return self.pool.view(-1, self.layout.head_dim)[at].double()

    def expected(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor) -> Tensor:
        """Computes the attention row by row in the expanded form, in float64."""
        case, outs, ends = self.case, [], np.cumsum(self.case.counts)
        q = torch.cat((q_nope, q_rope), dim=2).double()
        for row, (length, count) in enumerate(zip(case.seq_lens, case.counts, strict=True)):
            rows = self.rows(row, layer)
            both = torch.einsum("kc,hdc->khd", rows[:, : case.kv_rank], kv_b.double())
            k_nope, v = both.split((case.nope_dim, case.value_dim), dim=2)
            k_rope = rows[:, None, case.kv_rank :].expand(-1, case.num_heads, -1)
            own = q[ends[row] - count : ends[row]]
            scores = torch.einsum("qhd,khd->hqk", own, torch.cat((k_nope, k_rope), dim=2)) * case.latent.scale
            places = torch.arange(length, device=self.device)
            scores = scores.masked_fill(places[length - count :, None] < places, -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(outs)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _place(self) -> None:
        """Scatters the rows' blocks; the first ones are the first row's where tokens are shared."""
        case = self.case
        needed = [-(-length // case.block_size) for length in case.seq_lens]
        rng = np.random.default_rng(case.seed)
        free = rng.permutation(sum(needed) + 2).astype(np.int32)
        tables = np.full((len(needed), max(needed)), -1, np.int32)  # what is not needed is not read
        for row, count in enumerate(needed):
            tables[row, :count], free = free[:count], free[count:]
        tables[:, : case.shared // case.block_size] = tables[0, : case.shared // case.block_size]
        starts = np.cumsum([0, *case.counts], dtype=np.int32)
        self.queries = PagedQueries(starts, np.array(case.seq_lens, np.int32), tables)
        self.places = []
        for row, length in enumerate(case.seq_lens):
            index, at = np.divmod(np.arange(length), case.block_size)
            places = tables[row, index].astype(np.int64) * (_LAYERS * case.block_size) + at
            self.places.append(torch.from_numpy(places))


def run_case(case: Case, device: torch.device) -> list[Check]:
    """Checks the output of all layers, what was written, and that nothing else was."""
    step = Step(case, device)
    attention, before = step.attention(), step.pool.clone()
    plan, turn, num_new = step.plan(attention), step.turn(), sum(case.counts)
    checks = []
    for layer in range(_LAYERS):
        (kv, q_nope, q_rope), norm, kv_b = step.inputs(), step.vector(case.kv_rank), step.kv_b()
        attention.write(plan, layer, kv, turn, norm)
        name, ends = f"{case.name}, layer {layer}", zip(case.seq_lens, case.counts, strict=True)
        stored = torch.cat([step.rows(row, layer)[length - count :] for row, (length, count) in enumerate(ends)])
        expected = step.expected_rows(kv, turn, norm)[:num_new]
        checks.append(compare(f"{name}, rows written", stored, expected, case.dtype))
        out = attention.attend(plan, layer, q_nope, q_rope, step.products(kv_b))[:num_new]
        wanted = step.expected(layer, q_nope[:num_new], q_rope[:num_new], kv_b)
        error = compare(name, out.flatten(1), wanted.flatten(1), case.dtype)
        checks.append(Check(name, error.error, _BOUNDS[case.dtype]))
    raw = {2: torch.int16, 4: torch.int32}[case.dtype.itemsize]
    changed = int((before.view(raw) != step.pool.view(raw)).sum())
    new = num_new * _LAYERS * step.layout.head_dim
    checks.append(Check(f"{case.name}, elements of the pool written, but for the new tokens'", abs(changed - new), 0))
    return checks


def random_case(rng: np.random.Generator, max_tokens: int, dtype: torch.dtype) -> Case:
    """Makes a case of any kind, with rows of up to max_tokens tokens."""
    block_size, num_rows = int(rng.choice([8, 16, 32])), int(rng.integers(1, 6))
    seq_lens = np.exp(rng.uniform(0, math.log(max_tokens), num_rows)).astype(int)
    border = rng.random(num_rows) < 0.3
    seq_lens = np.where(border, -(-seq_lens // block_size) * block_size + rng.integers(0, 2, num_rows), seq_lens)
    counts = np.where(rng.random(num_rows) < 0.5, 1, rng.integers(1, np.minimum(seq_lens, 300) + 1))
    options: dict[str, object] = {"least_expanded": float(rng.choice([2, 20, math.inf]))}
    if rng.random() < 0.4:
        counts = np.ones_like(seq_lens)
        options = {"padded_rows": num_rows + int(rng.integers(0, 3))}
    if rng.random() < 0.3:
        options["split_keys"] = 128
    return Case(
        seq_lens=tuple(map(int, seq_lens)),
        counts=tuple(map(int, counts)),
        num_heads=int(rng.choice([1, 2, 5, 16, 20, 40, 128])),
        kv_rank=int(rng.choice([18, 24, 32, 48, 64])) if max_tokens < 1000 else int(rng.choice([48, 256, 512])),
        rope_dim=int(rng.choice([8, 16, 24, 64])),
        nope_dim=int(rng.choice([16, 24, 64])),
        value_dim=int(rng.choice([16, 40, 64])),
        block_size=block_size,
        dtype=dtype,
        at_once=int(rng.choice([3, 64])),
        most_keys=int(rng.choice([64, 200, 1 << 20])),
        num_multiprocessors=int(rng.choice([1, 8, 60])),
        seed=int(rng.integers(1 << 30)),
        **options,  # type: ignore[arg-type]
    )


def check(device: torch.device, seed: int, num_cases: int, max_tokens: int | None = None) -> list[Check]:
    """Checks random cases; smaller ones where kernels are interpreted."""
    rng = np.random.default_rng(seed)
    most = max_tokens or (200 if device.type == "cpu" else 2048)
    dtypes = (torch.float32, torch.bfloat16)
    return [
        found for _ in range(num_cases) for found in run_case(random_case(rng, most, dtypes[rng.integers(2)]), device)
    ]
