"""What of a GPU's memory is left for KV."""

import pytest

from services.engine.runner.gpu.memory import CardMemory, check_weights_fit, kv_budget
from services.protocol.model_files.base import ModelError

GIB = 1 << 30


def card(**sizes: int) -> CardMemory:
    """Of 80 GiB; 20 for weights are taken, by this process, unless something else is said."""
    chosen = {"total": 80, "free": 60, "own": 20, "step": 4} | sizes
    return CardMemory(**{name: size * GIB for name, size in chosen.items()})


def test_the_pool_gets_what_weights_and_steps_leave_of_the_fraction() -> None:
    assert kv_budget(card(), fraction=0.9, asked=None) == (72 - 20 - 4) * GIB
    assert kv_budget(card(), fraction=0.45, asked=None) == (36 - 20 - 4) * GIB


def test_others_on_the_card_count_where_less_is_free() -> None:
    assert kv_budget(card(free=30), fraction=0.9, asked=None) == 26 * GIB
    assert kv_budget(card(free=30), fraction=0.45, asked=None) == 12 * GIB


def test_a_size_that_is_asked_for_is_taken_whole_or_refused() -> None:
    assert kv_budget(card(), fraction=0.1, asked=56 * GIB) == 56 * GIB
    with pytest.raises(ModelError, match=r"the KV pool needs 57.00 GiB, 56.00 GiB of 80.00 GiB are left"):
        kv_budget(card(), fraction=0.9, asked=57 * GIB)


def test_no_room_for_kv_is_said_with_all_that_takes_room() -> None:
    with pytest.raises(ModelError, match=r"may take 30% of 80.00 GiB, .* take 20.00 GiB, .* 4.00 GiB, and 60.00 GiB"):
        kv_budget(card(), fraction=0.3, asked=None)


def test_weights_that_are_too_large_are_refused_before_they_are_read() -> None:
    check_weights_fit(16 * GIB, 16 * GIB)
    with pytest.raises(ModelError, match=r"weights need 16.00 GiB, 15.00 GiB are free on the GPU"):
        check_weights_fit(16 * GIB, 15 * GIB)
