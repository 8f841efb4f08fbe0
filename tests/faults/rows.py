"""The faults that Baton is held to, one row each, and how a test says of which row it is.

Each row has a test; tests/faults/test_rows.py holds that. Row by row, `make test-faults` prints what came out.
"""

from collections.abc import Callable

import pytest

ROWS = {
    1: "prefill worker dies before prefill ends",
    2: "prefill worker dies after prefill, before the read",
    3: "prefill worker dies in the middle of a read",
    4: "prefill worker frozen",
    5: "prefill worker thaws after the deadline",
    6: "decode worker dies while a request is queued there",
    7: "decode worker dies mid-stream",
    8: "decode worker frozen, and thawed later",
    9: "both die, and no other worker is there",
    10: "every prefill worker dead",
    11: "client leaves during prefill",
    12: "client leaves between the stages",
    13: "client leaves during a read",
    14: "client leaves mid-decode",
    15: "slow reader",
    16: "silence between the workers",
    17: "connections reset",
    18: "5 to 20 % of the packets lost",
    19: "bandwidth cut",
    20: "one-way partition",
    21: "handshake garbled, or of another model",
    22: "acknowledgement lost",
    23: "acknowledgement late",
    24: "lease ends during a read",
    25: "prefill worker restarts on the same address",
    26: "Redis killed",
    27: "Redis restarts empty",
    28: "Redis holds a wrong entry",
    29: "Redis hangs",
    30: "Redis full, or read-only",
    31: "gateway killed",
    32: "SIGTERM to a worker under load",
    33: "drain outlasts the grace period",
    34: "rolling restart of every worker under load",
    35: "five times the load",
    36: "block pool exhausted",
    37: "wall clock jumps",
    38: "retry storm",
    39: "file descriptors or log disk exhausted",
    40: "every decode worker dead",
    41: "both pools full of handoffs",
    42: "transport library aborts a worker",
    43: "a neighbour of another version",
    44: "owner of a shared pending prefix is aborted",
    45: "a request that makes the engine fail",
    46: "control stream between two workers breaks",
    47: "choices of one prompt aborted at block borders",
    48: "prefill and decode silent towards each other",
    49: "a firewall refuses a living worker's port",
    50: "every process restarted in turn by SIGTERM",
    55: "a rank dies, hangs, is cut off, or computes NaN",
    61: "gateway drained under streams of any door alone",
    62: "restart with another model in the directory",
    63: "restart interrupted twice",
    64: "SIGHUP to each process under load",
    65: "a child cannot be executed for a while",
    66: "a renewed certificate that TLS cannot use",
    67: "a key revoked while descriptors are out",
    68: "Redis away under background responses",
    69: "Redis' clock an hour back or forth",
}


def long(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that `make test-faults` runs and `make test` leaves out, so that this stays short."""
    return pytest.mark.faults_long(test)  # type: ignore[no-any-return]


def row(number: int) -> pytest.MarkDecorator:
    """A mark for tests of a row. Raises KeyError for one that there is not."""
    assert ROWS[number]
    return pytest.mark.fault_row(number)
