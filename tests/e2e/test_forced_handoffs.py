"""Four odd shapes of each family, over each transport, with every request handed off: what `transformers` computes.

`python -m tests.e2e.forced_all` runs them one after the other, and prints a table.
"""

from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES
from tests.e2e.forced_all import run_checks
from tests.e2e.forced_shapes import SHAPES, names_of
from tests.e2e.forced_stack import TRANSPORTS, forced_stack


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_whose_requests_are_all_handed_off(name: str, transport: str, tmp_path: Path) -> None:
    with forced_stack(name, transport, tmp_path) as forced:
        results = run_checks(forced)
    assert {check: result.problem for check, result in results.items() if result.problem} == {}


def test_each_family_has_four_shapes_one_of_them_with_all_settings() -> None:
    assert {family: len(names_of(family)) for family in FAMILIES} == dict.fromkeys(FAMILIES, 4)
    with_all = {family for name, (family, _) in SHAPES.items() if name.endswith("all-settings")}
    assert set(FAMILIES) - with_all == set()
