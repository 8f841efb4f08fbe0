"""The handoff benchmark between two real worker processes, small."""

import pytest

from loadtest.micro import handoff
from loadtest.micro.worker_process import StartError, running_pair
from services.config import TransportName, WorkerRole
from services.worker.worker import WorkerParts


@pytest.mark.long
async def test_every_moment_of_a_handoff_is_noted() -> None:
    found = await handoff.handoffs(max_num_batched_tokens=32, sizes=[1, 5], rounds=2)
    assert {blocks: len(handoffs) for blocks, handoffs in found.items()} == {1: 2, 5: 2}
    for blocks, handoffs in found.items():
        for noted in handoffs:
            assert 0 < noted.read_s < noted.ready_s
            assert noted.first_s > 0
            assert noted.gap_s > 0
            assert 1 <= noted.read_blocks <= blocks  # of how many chunks depends on who is faster
            assert noted.transport is TransportName.NIXL


def test_a_worker_that_does_not_start_says_why() -> None:
    with pytest.raises(StartError, match=r"(?s)the prefill worker: .*no prefill here"), running_pair(_refuse):
        pass


def _refuse(role: WorkerRole) -> WorkerParts:
    raise ValueError(f"no {role} here")
