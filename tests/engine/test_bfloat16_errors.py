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
SEEDS = 4
# A token that gets another expert, on either side, has ten times the error of others: a fifth of all is left out.
EXPERTS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
KEPT_OF_EXPERTS = 0.8
PROMPTS = prompts_of([200, 150, 90, 61, 200, 180])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_of_scores_is_that_of_torch(family: str, tmp_path: Path) -> None:
    """Over all tokens of prompts and checkpoints, which go in chunks through blocks here."""
    ours, theirs = [], []
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
            ours.append(found - right)
            theirs.append(rounded - right)
    kept = KEPT_OF_EXPERTS if family in EXPERTS else 1.0
    assert _error(ours, kept) <= MOST_OF_TORCH_S * _error(theirs, kept)


def _error(errors: list[torch.Tensor], kept: float) -> float:
    """The root of the mean square of the least errors, which are the part `kept` of all."""
    squares = torch.cat(errors).square().sort().values
    return float(squares[: int(len(squares) * kept)].mean().sqrt())


def _of_tokens(scores: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
