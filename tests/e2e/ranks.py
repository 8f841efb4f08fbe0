"""How many ranks the workers of stacks have, where a test does not say."""

import os
from collections.abc import Iterable

RANKS_VARIABLE = "BATON_TEST_RANKS"  # pytest's option --ranks, for the processes of its tests
_FLAG = "--tensor-parallel-size"


def rank_options(options: Iterable[str]) -> list[str]:
    """The options that make workers of so many ranks, unless these options say it."""
    number = os.environ.get(RANKS_VARIABLE, "1")
    return [] if number == "1" or _FLAG in options else [_FLAG, number]
