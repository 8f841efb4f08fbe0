"""Generated requests over HTTP and gRPC: `python -m tests.fuzz_api` sends as many as wanted, this a few."""

import contextlib

from tests.fuzz_api.target import Target, fuzz
from tests.gateway.api_thread import api_in_thread


def test_none_is_answered_by_a_fault_and_none_hangs() -> None:
    with api_in_thread() as (port, grpc_port), contextlib.closing(Target(port, grpc_port, "m")) as target:
        fuzz(target, 500, 1)
        assert {"200", "400", "OK", "INVALID_ARGUMENT"} <= target.answers.keys()
