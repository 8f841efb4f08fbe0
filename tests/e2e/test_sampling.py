"""Choices, penalties and scores of prompts through the whole stack: handed off, and the same as without."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gateway.api.requests.sampling import seed_of_choice
from tests.e2e.conftest import oracle, prompt_of
from tests.e2e.stack import Stack
from tests.e2e.test_pair import GREEDY, num_handed_off, text_of, until_handed_off
from tests.engine.oracle import possible_ranks

WARM: dict[str, Any] = {"model": "tiny", "temperature": 0.9, "top_p": 0.9, "max_tokens": 20}


def test_choices_are_those_of_requests_with_their_seeds_and_move_once(stack: Stack):
    gateway, prompt = stack.gateway, prompt_of(80, 43)

    def choices() -> list[str]:
        answer = gateway.client.completions.create(prompt=prompt, n=3, seed=5, **WARM)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 43
        return [choice.text for choice in answer.choices]

    before = gateway.moved_bytes()
    together = choices()
    moved = gateway.moved_bytes() - before
    # All blocks once, or, where a stalled machine makes decode avoid prefill for a moment, none.
    assert moved in (0, math.ceil(43 / 16) * (2 * 2 * 2 * 16 * 16 * 4))
    with stack.serving("--handoff", "never") as alone:
        for index, text in enumerate(together):
            seed = seed_of_choice(5, index)
            seed -= 2**64 if seed >= 2**63 else 0  # as a request may write the same 64 bits
            answer = alone.client.completions.create(prompt=prompt, seed=seed, **WARM)
            assert answer.choices[0].text == text
    assert len(set(together)) == 3
    assert until_handed_off(gateway, 1, choices) == together


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers_through_the_handoff(stack: Stack, llama: Path, penalty: float):
    for seed in (81, 82):
        prompt = prompt_of(seed, 30)
        expected = oracle(llama).generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=penalty,
        )
        options = {**GREEDY, "extra_body": {**GREEDY["extra_body"], "repetition_penalty": penalty}}
        complete = partial(stack.gateway.client.completions.create, prompt=prompt, max_tokens=20, **options)
        answer = until_handed_off(stack.gateway, 1, complete)
        text = text_of(llama, expected[0, len(prompt) :].tolist())
        assert answer.choices[0].text.rstrip("\ufffd") == text


@pytest.mark.long
def test_penalties_bias_and_bad_words_do_not_depend_on_the_handoff(stack: Stack):
    plain = stack.gateway.client.completions.create(prompt=prompt_of(83, 40), max_tokens=30, **GREEDY).choices[0].text
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": -2, "presence_penalty": -2},  # rewards, for what comes but once has nothing to lose
        {"logit_bias": {str(token): 4 for token in range(500, 540)}},
        {"extra_body": {"ignore_eos": True, "bad_words": plain.split()[:8]}},
    ]
    before = num_handed_off(stack.gateway)
    with stack.serving("--handoff", "never") as alone:
        for changed in settings:
            options = {**GREEDY, **changed, "prompt": prompt_of(83, 40), "max_tokens": 30}
            texts = [each.client.completions.create(**options).choices[0].text for each in (stack.gateway, alone)]
            assert texts[0] == texts[1] != plain
    assert num_handed_off(stack.gateway) > before


def test_scores_of_a_prompt_are_those_of_transformers(stack: Stack, llama: Path):
    """In odd chunks, with a cached prefix, and through the handoff: echo and vLLM's field have the same numbers."""
    prompt = prompt_of(84, 90)
    with torch.inference_mode():
        logprobs = oracle(llama)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]
    best = logprobs.topk(2).values

    def score() -> Any:
        return stack.gateway.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=2, n=2,
            extra_body={"prompt_logprobs": 1, "ignore_eos": True},
        )  # fmt: skip

    stack.gateway.client.completions.create(prompt=prompt, max_tokens=3, **GREEDY)
    for choice in until_handed_off(stack.gateway, 1, score).choices:
        found = choice.logprobs
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
        assert len(found.token_logprobs) == len(prompt) + 3
        for at, top in enumerate(found.top_logprobs[1 : len(prompt)]):
            assert max(top.values()) == pytest.approx(float(best[at, 0]), abs=1e-4)
        scores = zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)
        for at, (token, entry) in enumerate(scores):
            assert entry[str(token)]["logprob"] == pytest.approx(expected[at], abs=1e-4)
            assert entry[str(token)]["rank"] in possible_ranks(logprobs[at], token)
    stack.gateway.wait_for_baseline()
