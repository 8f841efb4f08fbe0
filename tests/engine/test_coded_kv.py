"""Attention over KV in codes of one byte, against float64 over the numbers that the codes stand for."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import Windows
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.kernels.base import CodedKv
from tests.engine.kernels import codes
from tests.engine.test_attention import DECODE, MIXED, NUM_LAYERS, SHARED, Case, check

FORMS = ("int8", "e4m3", "e4m3, static scales")
DTYPES = (torch.float32, torch.bfloat16)


class CodedCase(Case):
    """A case over a pool of codes, whose unwritten bytes are those of NaN."""

    backend = staticmethod(partial(CpuAttention, fused=True))

    def __init__(self, form: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layout = codes.coded_layout(form, NUM_LAYERS, self.num_kv_heads, self.head_dim, self.block_size)
        self.pool = torch.full(self.layout.shape(len(self.pool)), 0xFF, dtype=torch.uint8)
        static = None if self.layout.token_scales else codes.static_scales(NUM_LAYERS, self.num_kv_heads)
        self.static = static
        coded = CodedKv(self.dtype, static)
        self.attention = CpuAttention(self.pool, self.layout, self.num_heads, self.scoring, coded, fused=True)

    def encoded(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [2, tokens, kv_heads, head_dim] and scales of all K and V of a layer."""
        numbers = self.kv[layer]
        static = None if self.static is None else self.static[layer][:, None].expand(numbers.shape[:3])
        return codes.encode(numbers, self.layout.dtype, static)

    def expected(self, layer: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the stored numbers."""
        before, stored = self.kv, codes.decode(self.encoded(layer)[0], self.layout.dtype, self.encoded(layer)[1])
        self.kv = torch.zeros(before.shape, dtype=torch.float64)
        self.kv[layer] = stored
        result = super().expected(layer, window)
        self.kv = before
        return result


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_mixture(form: str, dtype: torch.dtype) -> None:
    for lengths, counts in (DECODE, MIXED):
        check(CodedCase(form, lengths, counts, dtype=dtype))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads"), [(64, 32, (4, 1)), (40, 8, (4, 4)), (24, 1, (6, 2)), (128, 16, (16, 2))]
)
def test_shapes(form: str, dtype: torch.dtype, head_dim: int, block_size: int, heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    shape = {"head_dim": head_dim, "block_size": block_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check(CodedCase(form, *MIXED, dtype=dtype, **shape))
    check(CodedCase(form, *MIXED, dtype=dtype, **shape), 20)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefixes_windows_caps_and_sinks(form: str, dtype: torch.dtype) -> None:
    lengths, counts = SHARED[2]
    scoring: dict[str, Any] = {"softcap": 0.5, "has_sinks": True}
    for options in ({}, scoring):
        case = CodedCase(form, lengths, counts, dtype=dtype, **options)
        case.share(len(lengths) - 1, 600)
        check(case)
        check(CodedCase(form, *MIXED, dtype=dtype, **options), 24)


@pytest.mark.few(4)
@pytest.mark.parametrize("head_dim", [32, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_the_nearest_code(form: str, dtype: torch.dtype, head_dim: int) -> None:
    """Byte for byte as torch does it, numbers beside each other of very different size too; a row of zeros; and where
    nothing was written nothing changes but for the rest of a begun block, which is cleared.
    """
    case = CodedCase(form, [20], [20], head_dim=head_dim, dtype=dtype)
    case.kv *= torch.logspace(-4, 4, 20).view(20, 1, 1)
    case.kv[:, :, :, :, ::3] *= 1e-3
    case.kv[0, 1, 7] = 0
    case.run()
    expected = torch.full_like(case.pool, 0xFF)
    expected[case.tables[0, 1]] = 0
    for layer in range(NUM_LAYERS):
        stored, scales = case.encoded(layer)
        for plane, token, head in np.ndindex(2, 20, case.num_kv_heads):
            place = int(case.tables[0, token // 16]), head, layer, plane
            codes.put(expected, case.layout, place, token % 16, stored[plane, token, head], scales[plane, token, head])
    assert torch.equal(case.pool, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_behind_the_last_key_does_not_matter(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that another worker sent may have anything there, in its scales too."""
    case = CodedCase(form, [1, 20, 33, 47], [1] * 4, dtype=torch.bfloat16)
    prepare: Callable[..., Any] = case.attention.prepare

    def prepare_and_spoil(queries: PagedQueries, window: Windows = None) -> Any:
        plan = prepare(queries, window)
        width = case.layout.head_dim
        planes = case.pool.view(len(case.pool), case.num_kv_heads, NUM_LAYERS, 2, -1)
        for table, length in zip(queries.block_tables, queries.seq_lens.tolist(), strict=True):
            block, position = table[(length - 1) // 16], (length - 1) % 16 + 1
            planes[block, ..., position * width : 16 * width] = 0xFF
            planes[block, ..., 16 * width + 4 * position :] = 0xFF
        return plan

    monkeypatch.setattr(case.attention, "prepare", prepare_and_spoil)
    check(case)


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("plane", [0, 1])
def test_numbers_that_are_not_finite_are_noticed(form: str, value: float, plane: int) -> None:
    """One in a key, or a value, makes the attention to it no number; static codes have no infinity, but NaN."""
    if "static" in form and math.isinf(value):
        value = math.nan
    for count in (1, 5):
        case = CodedCase(form, [20], [count], dtype=torch.bfloat16)
        case.kv[0, plane, 7, 0, 3] = value
        out, _ = case.run()[0]
        group = case.num_heads // case.num_kv_heads
        assert not out[:, :group].isfinite().all(dim=-1).any()
        assert out[:, group:].isfinite().all()
