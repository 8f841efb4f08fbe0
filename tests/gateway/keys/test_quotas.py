"""Limits of keys: the arithmetic beside a model of it, and what one gateway counts alone."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.errors import ApiError
from services.gateway.api.records.limits_left import duration
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import KeyQuota
from services.gateway.keys.rates import fill, remaining
from tests.gateway.keys.asks import ask


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=60))
def test_a_bucket_lets_in_what_exact_arithmetic_does(limit: int, steps: list[tuple[int, int]]):
    """Pauses in seconds and costs. The model keeps the bucket in fractions, and never has more than a minute in it."""
    level_s, exact = 0.0, Fraction(0)
    for pause_s, cost in steps:
        level_s, exact = level_s - pause_s, max(Fraction(0), exact - pause_s)
        wanted = exact + Fraction(cost * 60, limit)
        found = fill(level_s, cost, limit)
        assert (found.wait_s == 0) == (wanted <= 60)
        if wanted <= 60:
            exact = wanted
        else:
            assert found.wait_s == pytest.approx(float(wanted - 60))
        level_s = found.level_s
        assert level_s == pytest.approx(float(exact), abs=1e-6)
        assert remaining(level_s, limit) == (60 - exact) * limit // 60


def test_as_much_as_the_limit_comes_at_once_and_then_as_it_drains():
    level_s = 0.0
    for _ in range(3):
        level_s = fill(level_s, 1, 3).level_s
    assert fill(level_s, 1, 3).wait_s == pytest.approx(20)
    assert fill(level_s - 20, 1, 3).wait_s == 0


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3600, "1h0m0s")]
)
def test_times_are_written_as_openai_writes_them(seconds: float, shown: str):
    assert duration(seconds) == shown


LOOKED = st.lists(st.one_of(st.integers(1, 30), st.none()), min_size=1, max_size=30)  # tokens; None: a pause of 7 s


@settings(deadline=None)
@given(LOOKED, st.integers(0, 9), st.integers(0, 60), st.integers(0, 4))
def test_what_a_look_refuses_is_never_let_in(steps: list[int | None], requests: int, tokens: int, running: int):
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "max_concurrent": running}
    limits = {name: limit for name, limit in limits.items() if limit}
    now = [0.0]
    store = LocalQuotas(lambda: now[0])
    for number, step in enumerate(steps):
        if step is None:
            now[0] += 7
            continue
        seen, taken = store.look_at_share(ask(0, **limits), 1), store.take_share(ask(number, step, **limits), 1)
        assert seen.refusal is None or taken.refusal is not None
        assert seen.refusal is taken.refusal or step > 1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_the_parts_of_all_gateways_are_together_no_more_than_the_limit(limit: int, share: int):
    """Except that each gateway has one request at least."""
    stores = [LocalQuotas(lambda: 0.0) for _ in range(share)]
    taken = 0
    for store in stores:
        while store.take_share(ask(taken, requests_per_minute=limit), share).refusal is None:
            taken += 1
    assert taken == max(limit // share, 1) * share
    assert taken <= max(limit, share)


async def test_nobody_is_told_to_wait_longer_than_a_window():
    """An answer took ten minutes' worth: the key stays closed so long, and is asked again each minute."""
    now = [0.0]
    store = LocalQuotas(lambda: now[0])
    first = ask(1, 1, tokens_per_minute=10)
    await store.settle(first, await store.take(first), 100)
    quota = KeyQuota("key-0", first.limits, store, lambda refusal: None)
    for now[0], waits in ((0.0, "60"), (400.0, "60"), (500.0, "52")):
        with pytest.raises(ApiError) as refused:
            await quota.check(RequestRecord("r"))
        assert refused.value.headers["retry-after"] == waits
