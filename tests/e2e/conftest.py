"""Checkpoints and stacks that the end-to-end tests share."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.launcher import demo_model
from tests.checkpoints import write_checkpoint
from tests.e2e.stack import Stack, running_stack

VOCAB_SIZE = 4096  # the demo model's tokenizer


def write_model(directory: Path, family: str, **config) -> Path:
    """A tiny float32 checkpoint with the demo model's tokenizer and chat template."""
    write_checkpoint(directory, family, vocab_size=VOCAB_SIZE, eos_token_id=2, bos_token_id=None, **config)
    demo_model._write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_key_value_heads=1, head_dim=32)


@pytest.fixture(scope="session")
def stack(llama: Path) -> Iterator[Stack]:
    """One pair that computes in odd chunks; tests that use it leave it as they found it."""
    with running_stack(llama, options=["--max-num-batched-tokens", "37"]) as running:
        yield running


@functools.cache
def oracle(model: Path) -> PreTrainedModel:
    """The model as `transformers` has it. One thread: more would spin against the workers'."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def generate(model: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of `transformers` in float32, and their log-probabilities."""
    return _generate(model, tuple(prompt), num_tokens)


@functools.cache
def _generate(model: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
    out = oracle(model).generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logits = torch.stack(out.logits)[:, 0].log_softmax(-1)
    return tokens, logits[torch.arange(len(tokens)), tokens].tolist()
