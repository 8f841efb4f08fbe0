"""Checkpoints with numbers that are not finite, on the kernels of each runner: from the weights to the error."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config import Pooling
from services.engine.engine import Engine
from services.engine.runner.base import Runner
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.self_check import SelfCheckError
from services.protocol.outcomes import FailureCode
from tests.checkpoints import plant, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.test_torch_runner import OF_KERNELS, load

DAMAGED = 300  # the token with the damaged embedding
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # family, shape, options
    "float32": ("llama", {}, {}),
    "bfloat16 kernels": ("llama", OF_KERNELS, {}),
    "bfloat16 by torch": ("llama", OF_KERNELS, {"kernels": "torch"}),
    "float16": ("llama", {}, {"dtype": "float16"}),
    "window": ("mistral", {"sliding_window": 16}, {}),
    "opt": ("opt", {}, {}),
}


def driven_by(runner: Runner, *, prefill: bool = False) -> Driven:
    """An engine over the runner, which it has checked."""
    scheduler = PrefillScheduler(32) if prefill else DecodeScheduler(32, prefill_chunk=32)
    engine = Engine(runner, scheduler, max_num_seqs=8, max_model_len=128, eos_token_ids=())
    engine.check.learn()
    return Driven(engine)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_with_a_damaged_embedding_fails_the_requests_that_have_it(kind: str, tmp_path: Path) -> None:
    """With NaN or an infinity, anywhere in the prompt; the others' tokens are those of the sound checkpoint."""
    family, shape, options = KINDS[kind]
    name = "model.decoder.embed_tokens.weight" if family == "opt" else "model.embed_tokens.weight"
    shape = {**shape, "tie_word_embeddings": False}
    sound = write_checkpoint(tmp_path / "sound", family, **shape)
    others = [[7, *range(20, 20 + length)] for length in (1, 40)]
    reference = driven_by(load(sound, **options))
    expected = [reference.submit(prompt, 12) for prompt in others]
    reference.run()
    for value in (math.nan, math.inf):
        damaged = plant(write_checkpoint(tmp_path / f"{value}", family, **shape), name, DAMAGED, value)
        driven = driven_by(load(damaged, **options))
        handles = [driven.submit(prompt, 12) for prompt in others]
        failing = [driven.submit([*range(at), DAMAGED, *range(70 - at)], 5) for at in (0, 33, 70)]
        failing.append(driven.submit([9, DAMAGED, 8], 5, temperature=1.0, top_p=0.9, logit_bias=((9, -100.0),)))
        failing.append(driven.submit([9, DAMAGED, *range(40)], 5, num_prompt_logprobs=1))
        driven.run()
        assert [driven.tokens[handle] for handle in handles] == [reference.tokens[handle] for handle in expected]
        assert sorted(failure.handle for failure in driven.failures) == failing
        assert {failure.code for failure in driven.failures} == {FailureCode.NOT_FINITE}
        driven.assert_baseline()


@pytest.mark.parametrize("pooling", Pooling)
def test_an_embedding_of_such_a_prompt_fails(pooling: Pooling, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    plant(directory, "model.embed_tokens.weight", DAMAGED, math.nan)
    driven = driven_by(load(directory), prefill=True)
    failing = [driven.embed([*range(at), DAMAGED, *range(70 - at)], pooling) for at in (0, 40, 70)]
    sound = driven.embed(list(range(70)), pooling)
    driven.run()
    assert driven.embeddings.keys() - failing == {sound}
    assert np.isfinite([*driven.embeddings.values()]).all()
    assert [failure.handle for failure in driven.failures] == failing


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_spoil_everything_are_refused_at_the_start(tensor: str, value: float, tmp_path: Path) -> None:
    directory = plant(write_checkpoint(tmp_path / "model", tie_word_embeddings=False), tensor, 3, value)
    with pytest.raises(SelfCheckError, match="not finite, whatever the prompt"):
        driven_by(load(directory))


@pytest.mark.few(2)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("product", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16 kernels"])
def test_attention_hides_no_damage(kind: str, product: str, value: float, tmp_path: Path) -> None:
    """Every key, or every query or value, has it, so that no prompt may be answered."""
    family, shape, options = KINDS[kind]
    name = f"model.layers.0.self_attn.{product}.weight"
    directory = plant(write_checkpoint(tmp_path / "model", family, **shape), name, 3, value)
    with pytest.raises(SelfCheckError, match="not finite, whatever the prompt"):
        driven_by(load(directory, **options))


def test_a_runner_that_computes_otherwise_than_at_the_start_ends_its_engine(tmp_path: Path) -> None:
    """Its weights were overwritten: with NaN, which a step notices, and with other numbers, which the check does."""
    directory = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    plant(directory, "model.embed_tokens.weight", DAMAGED, math.nan)
    for factor in (math.nan, 2.0):
        runner = load(directory)
        driven = driven_by(runner)
        _norm_of(runner).mul_(factor)
        handle = driven.submit([7, DAMAGED if factor == 2.0 else 8], 5)
        with pytest.raises(SelfCheckError, match="self-check failed"):
            driven.run()
        assert handle not in driven.tokens
        assert not driven.failures


def _norm_of(runner: TorchRunner) -> torch.Tensor:
    """The weight of the norm before the last layer's MLP."""
    model: Any = runner._model
    weight: torch.Tensor = model._weights.layers[-1].mlp_norm
    return weight
