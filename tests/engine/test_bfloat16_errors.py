"""How far models in bfloat16 are from float32: no further than `transformers` in bfloat16, whatever the family."""

from pathlib import Path

import pytest
import torch

from services.engine.engine import Engine
from services.engine.schedulers.decode import DecodeScheduler
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, prompts_of
from tests.engine.test_torch_runner import load

MOST_OF_TORCH_S = 1.05
SEEDS = 10  # an expert that either choice of a few tokens makes is worth more than all roundings; over many it is even
PROMPTS = prompts_of([200, 150, 90, 61, 200, 180])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_of_scores_is_that_of_torch(family: str, tmp_path: Path) -> None:
    """The mean square over all tokens of prompts and checkpoints, which go in chunks through blocks here."""
    ours, theirs = torch.zeros(()), torch.zeros(())
    for seed in range(SEEDS):
        directory = write_checkpoint(tmp_path / str(seed), family, seed=seed, dtype=torch.bfloat16)
        exact, plain = Reference(directory), Reference(directory, torch.bfloat16)
        scheduler = DecodeScheduler(64, prefill_chunk=64)
        driven = Driven(Engine(load(directory), scheduler, max_num_seqs=8, max_model_len=300, eos_token_ids=()))
        handles = [driven.submit(prompt, 1, num_prompt_logprobs=1) for prompt in PROMPTS]
        driven.run()
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            right, rounded = (_of_tokens(reference.scores(prompt), prompt) for reference in (exact, plain))
            found = torch.tensor([score.sampled for score in driven.scores[handle]])
            ours += (found - right).square().mean()
            theirs += (rounded - right).square().mean()
    assert float((ours / theirs).sqrt()) <= MOST_OF_TORCH_S, f"{family}: {float(ours)} beside {float(theirs)}"


def _of_tokens(scores: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
