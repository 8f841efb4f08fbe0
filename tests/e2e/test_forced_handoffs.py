"""A shape of each family with all its settings, every request handed off: what `transformers` computes.

`python -m tests.e2e.forced_all` runs all shapes over each transport, one after the other, and prints a table.
"""

from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES
from tests.e2e.forced_all import run_checks
from tests.e2e.forced_shapes import SHAPES, names_of
from tests.e2e.forced_stack import Division, Ranks, forced_stack

ALL_SETTINGS = [name for name in SHAPES if name.endswith("all-settings")]
OVER_GRPC = ("llama-gqa3-all-settings", "gemma3-gqa3-24-all-settings", "deepseek-v3-odd-heads-all-settings")
CASES = [*((name, "nixl") for name in ALL_SETTINGS), *((name, "grpc") for name in OVER_GRPC)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "transport"), CASES)
def test_a_shape_whose_requests_are_all_handed_off(name: str, transport: str, tmp_path: Path) -> None:
    with forced_stack(name, transport, tmp_path) as forced:
        results = run_checks(forced)
    assert {check: result.problem for check, result in results.items() if result.problem} == {}


UNEQUAL = [
    ("llama-gqa3-all-settings", "nixl", (2, 1)),
    ("gemma3-gqa3-24-all-settings", "grpc", (1, 3)),
    ("deepseek-v3-odd-heads-all-settings", "nixl", (3, 2)),
    ("qwen2-gqa3-all-settings", "grpc", (4, 2)),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "transport", "ranks"), UNEQUAL)
def test_handoffs_between_workers_of_different_numbers_of_ranks(
    name: str, transport: str, ranks: Ranks, tmp_path: Path
) -> None:
    with forced_stack(name, transport, tmp_path, division=Division(ranks)) as forced:
        results = run_checks(forced)
    assert {check: result.problem for check, result in results.items() if result.problem} == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "transport", "ranks"),
    [
        ("llama-gqa3-all-settings", "grpc", (1, 2)),
        ("gemma3-gqa3-24-all-settings", "nixl", (1, 2)),
        ("deepseek-v3-odd-heads-all-settings", "nixl", (1, 1)),
        ("qwen2-gqa3-all-settings", "grpc", (2, 1)),
    ],
)
def test_handoffs_out_of_stages(name: str, transport: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two of them, with so many ranks each."""
    with forced_stack(name, transport, tmp_path, division=Division(ranks, stages=2)) as forced:
        results = run_checks(forced)
    assert {check: result.problem for check, result in results.items() if result.problem} == {}


WHOLE_EXPERTS = [
    ("mixtral-gqa3-all-settings", "nixl", (2, 2), ("decode",)),
    ("deepseek-v3-odd-heads-all-settings", "grpc", (3, 2), ("prefill", "decode")),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "transport", "ranks", "roles"), WHOLE_EXPERTS)
def test_handoffs_between_ranks_with_whole_experts_and_with_their_columns(
    name: str, transport: str, ranks: Ranks, roles: tuple[str, ...], tmp_path: Path
) -> None:
    with forced_stack(name, transport, tmp_path, division=Division(ranks, whole_experts=roles)) as forced:
        results = run_checks(forced)
    assert {check: result.problem for check, result in results.items() if result.problem} == {}


def test_each_family_has_four_shapes_one_of_them_with_all_settings() -> None:
    assert {family: len(names_of(family)) for family in FAMILIES} == dict.fromkeys(FAMILIES, 4)
    assert {SHAPES[name][0] for name in ALL_SETTINGS} == set(FAMILIES)
