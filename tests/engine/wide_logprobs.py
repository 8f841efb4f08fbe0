"""Rows that ask for the whole vocabulary's logprobs, beside rows that ask for few or none."""

import pytest
import torch

from services.engine.engine import Engine
from services.engine.runner.base import Runner
from services.engine.schedulers.decode import DecodeScheduler
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, prompts_of


def assert_right_beside_narrow_ones(runner: Runner, reference: Reference, *, depth: int) -> None:
    """Of each token of prompt and answer."""
    scheduler = DecodeScheduler(64, prefill_chunk=32)
    engine = Engine(runner, scheduler, max_num_seqs=4, max_model_len=64, eos_token_ids=(), pipeline_depth=depth)
    driven, prompts, vocab = Driven(engine), prompts_of([20, 9, 5]), runner.vocab_size
    widths = (2, vocab, None)
    handles = [
        driven.submit(prompt, 4, num_logprobs=width, num_prompt_logprobs=width)
        for prompt, width in zip(prompts, widths, strict=True)
    ]
    driven.run()
    for handle, prompt, width in zip(handles, prompts, widths, strict=True):
        tokens, logprobs = reference.run(prompt, 4)
        assert driven.tokens[handle] == tokens
        if width is None:
            continue
        found = [*driven.scores[handle], *driven.logprobs[handle]]
        for entry, expected in zip(found, torch.cat([reference.scores(prompt), logprobs]), strict=True):
            assert len(entry.top) == width
            assert [value for _, value in entry.top] == pytest.approx(expected.topk(width).values.tolist(), abs=1e-4)
            assert all(value == pytest.approx(float(expected[token]), abs=1e-4) for token, value in entry.top)
            assert len({token for token, _ in entry.top}) == width
    driven.assert_baseline()
