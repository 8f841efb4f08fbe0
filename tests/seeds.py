"""Seeds of random tests: the first few run always, the others with `--long`, as in continuous integration."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest


def first_of(number: int, values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, of which all but the first so many are marked long."""
    left = iter(values)
    return [*islice(left, number), *(pytest.param(value, marks=pytest.mark.long) for value in left)]
