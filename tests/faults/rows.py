"""The faults that Baton is held to, one row each, and how a test says of which row it is.

A row has tests, or a reason why it has none yet; tests/faults/test_rows.py holds that. Row by row, `make test-faults`
prints what came out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. `pending`: why no test over real processes is there yet."""

    title: str
    pending: str = ""


NO_TEST_YET = "no test over real processes yet"

ROWS = {
    1: Row("prefill worker dies before prefill ends"),
    2: Row("prefill worker dies after prefill, before the read"),
    3: Row("prefill worker dies in the middle of a read"),
    4: Row("prefill worker frozen"),
    5: Row("prefill worker thaws after the deadline"),
    6: Row("decode worker dies while a request is queued there"),
    7: Row("decode worker dies mid-stream"),
    8: Row("decode worker frozen, and thawed later"),
    9: Row("both die, and no other worker is there"),
    10: Row("every prefill worker dead"),
    11: Row("client leaves during prefill"),
    12: Row("client leaves between the stages"),
    13: Row("client leaves during a read"),
    14: Row("client leaves mid-decode"),
    15: Row("slow reader"),
    16: Row("silence between the workers"),
    17: Row("connections reset"),
    18: Row("5 to 20 % of the packets lost", "needs nft or netem, which lose packets; a proxy between them cannot"),
    19: Row("bandwidth cut"),
    20: Row("one-way partition"),
    21: Row("handshake garbled, or of another model"),
    22: Row("acknowledgement lost"),
    23: Row("acknowledgement late"),
    24: Row("lease ends during a read"),
    25: Row("prefill worker restarts on the same address"),
    26: Row("Redis killed"),
    27: Row("Redis restarts empty"),
    28: Row("Redis holds a wrong entry"),
    29: Row("Redis hangs"),
    30: Row("Redis full, or read-only"),
    31: Row("gateway killed"),
    32: Row("SIGTERM to a worker under load"),
    33: Row("drain outlasts the grace period"),
    34: Row("rolling restart of every worker under load"),
    35: Row("five times the load"),
    36: Row("block pool exhausted"),
    37: Row("wall clock jumps"),
    38: Row("retry storm"),
    39: Row("file descriptors or log disk exhausted"),
    40: Row("every decode worker dead"),
    41: Row("both pools full of handoffs"),
    42: Row("transport library aborts a worker"),
    43: Row("a neighbour of another version"),
    44: Row("owner of a shared pending prefix is aborted"),
    45: Row("a request that makes the engine fail"),
    46: Row("control stream between two workers breaks"),
    47: Row("choices of one prompt aborted at block borders"),
    48: Row("prefill and decode silent towards each other"),
    49: Row("a firewall refuses a living worker's port"),
    50: Row("every process restarted in turn by SIGTERM"),
}


def long(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that `make test-faults` runs and `make test` leaves out, so that this stays short."""
    return pytest.mark.faults_long(test)  # type: ignore[no-any-return]


def row(number: int) -> pytest.MarkDecorator:
    """A mark for tests of a row. Raises KeyError for one that there is not."""
    assert ROWS[number]
    return pytest.mark.fault_row(number)
