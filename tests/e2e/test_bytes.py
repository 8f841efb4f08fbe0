"""The pair where neither worker can reach the other's memory: KV moves as bytes over gRPC."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import clear_prompt
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.e2e.streaming import NUM_TOKENS, Streaming
from tests.e2e.test_pair import check_parity


@pytest.fixture(scope="module")
def bytes_stack(llama: Path) -> Iterator[Stack]:
    with running_stack(llama, options=["--max-num-batched-tokens", "37", "--transport", "grpc"]) as running:
        yield running


@pytest.mark.long
def test_llama_equals_transformers_with_every_request_handed_off_over_grpc(bytes_stack: Stack, llama: Path):
    check_parity(bytes_stack.gateway, llama)
    assert bytes_stack.gateway.metric("baton_kv_bytes_moved_total") > 0


@pytest.mark.long
def test_requests_outlive_a_prefill_worker_that_is_killed_while_its_bytes_are_on_their_way(
    bytes_stack: Stack, llama: Path
):
    """When the first of them has text, the others' prompts are being computed and read, chunk by chunk."""
    prompts = [clear_prompt(llama, 190 + index, 300, NUM_TOKENS) for index in range(4)]
    clients = [Streaming(bytes_stack, prompt) for prompt in prompts]
    wait_until(lambda: any(each.text for each in clients), 200, "the first text")
    bytes_stack.workers["prefill-0"].kill()
    for each in clients:
        each.expect(llama)
    bytes_stack.heal()
    bytes_stack.gateway.wait_for_baseline()
