"""Rows of microbenchmarks, as a table and as JSON."""

import json
from pathlib import Path

from loadtest.tables import Record, spread, table, write_json


def test_columns_are_the_keys_of_all_rows_and_are_aligned() -> None:
    """Text to the left, numbers to the right; what a row does not have is empty."""
    assert table([{"what": "a", "us": 1234.5}, {"what": "longer", "us": 0.125, "batch": 8}]).splitlines() == [
        "what       us  batch",
        "a       1,234",
        "longer   0.12      8",
    ]


def test_percentiles_are_columns() -> None:
    assert spread(range(101), (0, 50, 99, 100)) == {"min": 0.0, "p50": 50.0, "p99": 99.0, "max": 100.0}


def test_json_is_the_flat_list_of_rows(tmp_path: Path) -> None:
    rows: list[Record] = [{"batch": 1, "us_per_step": 2.5}, {"batch": 8, "what": "x"}]
    write_json(rows, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
