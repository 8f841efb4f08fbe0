"""`python -m loadtest micro kv`: what it says of each kind of KV."""

import pytest

from loadtest.micro.kv import measure


@pytest.mark.long
def test_each_kind_is_measured_beside_bfloat16() -> None:
    plain, int8, fp8 = measure(rows=2, tokens=40, layers=2, kv_heads=2, head_dim=32, group=3, rounds=1)
    assert [str(record["kv"]).partition(",")[0] for record in (plain, int8, fp8)] == ["bfloat16", "int8", "fp8"]
    assert plain["token_bytes"] == 2 * 2 * 2 * 32 * 2
    assert int8["token_bytes"] == fp8["token_bytes"] == 2 * 2 * 2 * (32 + 4)
    assert plain["times_sooner"] == 1
