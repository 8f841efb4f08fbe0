"""Checkpoints and stacks that the end-to-end tests share."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from services.launcher import random_model
from tests.checkpoints import write_checkpoint
from tests.e2e.stack import Stack, running_stack
from tests.e2e.up import Up, running_up
from tests.gateway.keys.key_files import KeySet, write_keys

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 4096  # the random model's tokenizer


def write_model(directory: Path, family: str, **config) -> Path:
    """A tiny float32 checkpoint with the random model's tokenizer and chat template."""
    write_checkpoint(directory, family, vocab_size=VOCAB_SIZE, eos_token_id=2, bos_token_id=None, **config)
    random_model._write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def stack(llama: Path) -> Iterator[Stack]:
    """One pair that computes in odd chunks; tests that use it leave it as they found it."""
    with running_stack(llama, options=["--max-num-batched-tokens", "37"]) as running:
        yield running


@dataclass(frozen=True)
class SecureUp:
    """A running `baton up --tls --keys FILE`."""

    up: Up
    keys: KeySet


@pytest.fixture(scope="session")
def secure(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureUp]:
    directory = tmp_path_factory.mktemp("secure")
    keys = write_keys(directory / "keys.json")
    with running_up(llama, directory, "--tls", "--keys", str(keys.path)) as up:
        files = up.ca_file.parent
        yield SecureUp(up, keys)
    assert not files.exists()


@functools.cache
def oracle(model: Path) -> "PreTrainedModel":
    """The model as `transformers` has it. One thread: more would spin against the workers'."""
    from transformers import AutoModelForCausalLM  # takes its time, which only the process that compares should pay

    torch.set_num_threads(1)
    # Eager experts take any width; others take multiples of 16 bytes.
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")


@dataclass(frozen=True)
class Answer:
    """What `transformers` generates greedily in float32."""

    tokens: list[int]
    logprobs: list[float]
    clearness: float  # the smallest lead of a chosen token's logit over the next best


@functools.cache
def _generate(model: Path, prompt: tuple[int, ...], num_tokens: int) -> Answer:
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
    tokens = out.sequences[0, len(prompt) :]
    logits = torch.stack(out.logits)[:, 0]
    best = logits.topk(2).values
    chosen = logits.log_softmax(-1)[torch.arange(num_tokens), tokens]
    return Answer(tokens.tolist(), chosen.tolist(), float((best[:, 0] - best[:, 1]).min()))


def generate(model: Path, prompt: list[int], num_tokens: int) -> Answer:
    """The answer to one prompt."""
    return _generate(model, tuple(prompt), num_tokens)


def clear_prompt(model: Path, seed: int, length: int, num_tokens: int) -> list[int]:
    """A prompt whose answer has no near tie, which rounding could decide otherwise in another batch."""
    for attempt in range(20):
        prompt = prompt_of(seed + 1000 * attempt, length)
        if generate(model, prompt, num_tokens).clearness > 2e-4:
            return prompt
    raise AssertionError("no clear prompt among twenty")


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt like no other seed's."""
    return [(seed * 7919 + index * 104729) % 4000 + 10 for index in range(length)]
