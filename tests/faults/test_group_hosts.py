"""Handoffs of workers whose ranks are on two hosts, on either side and by each transport."""

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.test_pair import GREEDY, text_of, until_handed_off
from tests.faults.group_hosts import GroupHosts, group_hosts
from tests.machine import NAMESPACES, needs

pytestmark = [needs(NAMESPACES), pytest.mark.long]

NUM_TOKENS = 16


def complete(stack: GroupHosts, prompt: list[int]) -> str:
    """The text of an answer."""
    answer = stack.gateway.client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
    return str(answer.choices[0].text).rstrip("\ufffd")


def check_answers(stack: GroupHosts, seeds: "count[int]") -> None:
    """Prompts at borders of blocks, handed off; and each again, which prefill has cached."""
    for length in (15, 16, 17, 100, 440):
        prompt = clear_prompt(stack.model, next(seeds), length, NUM_TOKENS)
        expected = text_of(stack.model, generate(stack.model, prompt, NUM_TOKENS).tokens)
        for _ in range(2):
            assert until_handed_off(stack.gateway, 1, partial(complete, stack, prompt)) == expected


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@pytest.mark.parametrize("groups", [("prefill", "decode"), ("prefill",), ("decode",)])
def test_a_worker_of_two_hosts_hands_over(model: Path, tmp_path: Path, transport: str, groups: tuple[str, ...]) -> None:
    with group_hosts(model, tmp_path, transport, *groups) as stack:
        check_answers(stack, count(1001))
        ways = stack.gateway.metric("baton_pair_transport", transport=transport)
        assert ways == 1
        stack.gateway.wait_for_baseline()
