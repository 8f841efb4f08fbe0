"""Fields of vLLM through the whole stack: handed off, and the same as `transformers` has it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import VOCAB_SIZE, oracle, prompt_of
from tests.e2e.stack import Stack
from tests.e2e.test_pair import until_handed_off


def test_allowed_tokens_and_named_alternatives_are_those_of_transformers(stack: Stack, llama: Path):
    prompt, allowed, named = prompt_of(91, 40), list(range(700, 730)), [5, 700, 3]
    expected: list[int] = []
    logprobs: list[list[float]] = []
    with torch.inference_mode():
        for _ in range(6):
            logits = oracle(llama)(torch.tensor([prompt + expected])).logits[0, -1]
            logprobs.append(logits.log_softmax(-1)[named].tolist())
            expected.append(allowed[int(logits[allowed].argmax())])

    def complete() -> Any:
        return stack.gateway.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=1,
            extra_body={
                "allowed_token_ids": allowed, "logprob_token_ids": named, "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )  # fmt: skip

    (choice,) = until_handed_off(stack.gateway, 1, complete).choices
    assert choice.token_ids == expected
    for found, wanted in zip(choice.logprobs.top_logprobs, logprobs, strict=True):
        assert [found[f"token_id:{token}"] for token in named] == pytest.approx(wanted, abs=1e-4)
    stack.gateway.wait_for_baseline()


@pytest.mark.long
def test_the_whole_vocabulary_is_that_of_transformers(stack: Stack, llama: Path):
    """Of a prompt that is handed off, in parts, and of the first token, which the producer sends the consumer."""
    prompt = prompt_of(94, 45)
    with torch.inference_mode():
        expected = oracle(llama)(torch.tensor([prompt])).logits[0].log_softmax(-1)

    def complete() -> Any:
        return gateway.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, temperature=0, logprobs=VOCAB_SIZE,
            extra_body={"prompt_logprobs": -1, "return_tokens_as_token_ids": True, "ignore_eos": True},
        )  # fmt: skip

    with stack.serving("--max-logprobs", "-1") as gateway:
        (choice,) = until_handed_off(gateway, 1, complete).choices
        gateway.wait_for_baseline()
    for logprobs, entry in zip(expected, choice.prompt_logprobs[1:], strict=False):
        assert [entry[str(token)]["logprob"] for token in range(VOCAB_SIZE)] == pytest.approx(
            logprobs.tolist(), abs=1e-4
        )
        assert sorted(each["rank"] for each in entry.values()) == list(range(1, VOCAB_SIZE + 1))
    (first, second) = choice.logprobs.top_logprobs
    assert [first[f"token_id:{token}"] for token in range(VOCAB_SIZE)] == pytest.approx(expected[-1].tolist(), abs=1e-4)
    assert len(second) == VOCAB_SIZE


def test_a_prompt_is_found_in_caches_by_its_own_salt_alone(stack: Stack):
    prompt = prompt_of(92, 48)

    def cached(salt: str | None) -> int:
        answer = stack.gateway.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, temperature=0, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        stack.gateway.wait_for_baseline()
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(salt) >= 16 for salt in ("a", "b", None))


def test_a_prompt_is_scored_and_nothing_is_generated(stack: Stack, llama: Path):
    prompt = prompt_of(93, 30)
    with torch.inference_mode():
        logprobs = oracle(llama)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    answer = stack.gateway.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=0, temperature=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    stack.gateway.wait_for_baseline()
