"""Whatever setting of config.json is changed, the model computes what `transformers` does, or is refused by name."""

import random
from pathlib import Path

import pytest

from tests.checkpoints import ENCODERS, FAMILIES
from tests.engine.models.variants import ALL, Tried, variants_of

_NUM_DRAWN = 32  # of each family; `python -m tests.engine.models.variants` tries all


@pytest.mark.few(2)
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ENCODERS)])
def test_a_changed_setting_changes_what_it_changes_in_transformers(family: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    drawn = random.Random(seed).sample(variants_of(family), _NUM_DRAWN)
    print(f"seed {seed}: {', '.join(map(str, drawn))}")
    tried = Tried(tmp_path / "model", family)
    for variant in drawn:
        tried.check(variant)


def test_there_are_at_least_160_variants() -> None:
    """The settings come from `transformers`, so a version that hides them would leave nothing to try."""
    assert sum(len(variants_of(family)) for family in ALL) >= 160
