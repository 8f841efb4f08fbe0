"""Packets between workers, and between them and the gateway, are lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack, worker_ports
from tests.faults.case import Case
from tests.faults.namespace import lose_packets, num_lost, private_network
from tests.faults.rows import long, row


class LossyStack(Stack):
    """A stack in a network of its own."""

    def heal(self) -> None:
        """Ends the loss of packets."""
        lose_packets(0, [])
        super().heal()


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[LossyStack]:
    """Two of each role. Their blocks move over TCP, as all else does."""
    with private_network() as enter:
        options = ["--transport", "grpc"]
        stack = LossyStack(model, worker_ports(2, 2), options, None, prepare=enter, prepare_gateway=enter)
        with stack.running():
            yield stack


@long
@row(18)
@pytest.mark.parametrize("percent", [5, 20])
def test_requests_over_links_that_lose_packets_take_longer_and_are_right(stack: LossyStack, case: Case, percent: int):
    prompts = case.prompts(6)
    case.stream(2)
    case.fault()
    lose_packets(percent, stack.ports.values())
    for client in case.ask(prompts) + case.ask(prompts):
        client.join(120)
    assert num_lost() > 0
    case.settle()
