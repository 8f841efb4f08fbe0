"""Attention over latents in Triton against float64, over steps of `tests.gpu.checks.latents`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.checks import latents as checks
from tests.gpu.checks.latents import Case, Step, run_case

DECODE: dict[str, Any] = {"seq_lens": (1, 16, 17, 90, 33), "counts": (1,) * 5}
MIXED: dict[str, Any] = {"seq_lens": (1, 33, 17, 70, 64, 5), "counts": (1, 33, 1, 20, 1, 2)}


def verify(device: torch.device, **options: Any) -> None:
    for check in run_case(Case(**options), device):
        assert check.ok, check


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 5, 16, 40])
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_absorbed_rows_of_any_mixture(device: torch.device, rows: dict, num_heads: int, dtype: torch.dtype) -> None:
    verify(device, **rows, dtype=dtype, num_heads=num_heads, kv_rank=24)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kv_rank", "rope_dim"), [(18, 8), (48, 24), (64, 64), (80, 10), (8, 2)])
def test_latents_of_any_width(device: torch.device, kv_rank: int, rope_dim: int) -> None:
    """In both forms."""
    sizes = {"kv_rank": kv_rank, "rope_dim": rope_dim, "num_heads": 3}
    verify(device, seq_lens=(50, 40, 20), counts=(1, 25, 5), least_expanded=20, **sizes)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [{"nope_dim": 24, "value_dim": 40}, {"num_heads": 1}, {"num_heads": 5, "at_once": 2}, {"rope_dim": 64}]
)
def test_expanded_rows_beside_others(device: torch.device, sizes: dict, dtype: torch.dtype) -> None:
    """A whole prompt, a chunk behind a prefix that ends within a block, and rows in the other form."""
    verify(device, seq_lens=(70, 150, 40, 9), counts=(70, 65, 1, 3), least_expanded=65, dtype=dtype, **sizes)


@pytest.mark.long
@pytest.mark.parametrize(("most_keys", "block_size"), [(64, 16), (130, 8), (1, 64), (200, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_in_several_pieces(device: torch.device, dtype: torch.dtype, most_keys: int, block_size: int) -> None:
    """A piece has keys of two rows, or of a part of one, and later ones are seen by none of the first tokens."""
    sizes = {"most_keys": most_keys, "block_size": block_size}
    verify(device, seq_lens=(150, 290), counts=(140, 30), least_expanded=2, dtype=dtype, **sizes)


@pytest.mark.long
def test_pieces_do_not_change_a_result(device: torch.device) -> None:
    """To the bit."""
    case = Case(seq_lens=(40, 300), counts=(40, 100), least_expanded=2, dtype=torch.bfloat16)
    found = []
    for most_keys in (64, 200, 1000):
        step = Step(replace(case, most_keys=most_keys), device)
        attention = step.attention()
        plan, (kv, q_nope, q_rope) = step.plan(attention), step.inputs()
        attention.write(plan, 1, kv, step.turn(), step.vector(case.kv_rank))
        found.append(attention.attend(plan, 1, q_nope, q_rope, step.products(step.kv_b())))
    assert len(plan.pieces) == 1
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.long
@pytest.mark.parametrize("padded_rows", [4, None])
def test_long_rows_are_split(device: torch.device, padded_rows: int | None) -> None:
    verify(device, seq_lens=(600, 40, 1025), counts=(1, 1, 1), num_multiprocessors=12, padded_rows=padded_rows)


@pytest.mark.long
@pytest.mark.parametrize("padded_rows", [8, None])
def test_rows_that_share_a_prefix(device: torch.device, padded_rows: int | None) -> None:
    case = Case(
        seq_lens=(1000, 999, 1005, 1010, 1001, 998),
        counts=(1,) * 6,
        shared=992,
        num_heads=5,
        padded_rows=padded_rows,
    )
    step = Step(case, device)
    plan = step.plan(step.attention()).absorbed
    assert plan is not None
    assert any(launch.kind == "shared" and int(launch.items[0, 0]) > 0 for launch in plan.work.at(0).launches)
    for check in run_case(case, device):
        assert check.ok, check


@pytest.mark.parametrize("count", [1, 30])
def test_with_fixed_splits_a_row_alone_is_the_row_in_a_batch(device: torch.device, count: int) -> None:
    """To the bit, in the absorbed form."""
    options: dict[str, Any] = {"split_keys": 128, "num_heads": 2, "dtype": torch.bfloat16}
    step = Step(Case(seq_lens=(300, 40), counts=(count, 1), **options), device)
    (kv, q_nope, q_rope), turn, norm, products = step.inputs(), step.turn(), step.vector(32), step.products(step.kv_b())
    attention = step.attention()
    plan = step.plan(attention)
    attention.write(plan, 0, kv, turn, norm)
    together = attention.attend(plan, 0, q_nope, q_rope, products)[:count]

    step.queries = replace(
        step.queries,
        query_starts=step.queries.query_starts[:2],
        seq_lens=step.queries.seq_lens[:1],
        block_tables=step.queries.block_tables[:1],
    )
    plan = step.plan(attention)
    assert torch.equal(attention.attend(plan, 0, q_nope[:count], q_rope[:count], products), together)


@pytest.mark.long
def test_random_cases(device: torch.device) -> None:
    """Other ones with every seed; on a GPU, `loadtest.gpu` runs many and long ones."""
    for check in checks.check(device, seed=1, num_cases=6):
        assert check.ok, check
