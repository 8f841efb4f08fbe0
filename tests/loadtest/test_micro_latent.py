"""The benchmark of attention over latents, small."""

from pathlib import Path

import pytest

from loadtest.cannot_run import CannotRun
from loadtest.micro import latent

TREE = Path(__file__).parents[2]


@pytest.mark.long
def test_bytes_are_those_of_the_layout_and_each_kind_has_a_time() -> None:
    records = latent.measure(context=33, rows=2, threads=1, rounds=1, runs=2, before=TREE)
    of_part = {(record["part"], record.get("dtype")): record for record in records}
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for part, numbers in (("latent", 512 + 64), ("dense", 16 * 2 * 128)):
            record = of_part[part, dtype]
            assert record["counted_mb"] == record["layout_mb"] == 2 * 33 * numbers * size / 1e6
            assert float(record["ms"]) > 0
        assert of_part["dense / latent", dtype]["bytes_ratio"] == pytest.approx(16 * 2 * 128 / (512 + 64))
        assert float(of_part["dense, this tree / the one before", dtype]["time_ratio_p50"]) > 0


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="no tree"):
        latent.measure(context=33, rows=2, threads=1, rounds=1, runs=2, before=tmp_path)
