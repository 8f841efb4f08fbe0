"""Penalties, bias and bad words: what they do to logits, and that they go on wherever a sequence goes on."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from services.engine.runner.cpu.sampler import sample
from services.engine.sampling.logit_edits import edits_of, gather_edits
from services.protocol.sampling import SamplingParams
from tests.engine.harness import make_engine, reference
from tests.engine.test_sampler import batch

VOCAB = 40
NO_BANS = np.zeros(0, np.int32)


def chosen(logits: torch.Tensor, sequences: list[list[int]], num_prompt: int, **sampling: Any) -> list[int]:
    """Greedy tokens under one request's edits, for sequences of which it all holds."""
    params = SamplingParams(max_tokens=99, **sampling)
    rows = []
    for row, sequence in enumerate(sequences):
        own, tokens = edits_of(params, num_prompt), np.array(sequence, np.int32)
        rows.append((row, own, tokens, NO_BANS if own is None else own.banned(tokens)))
    edits = gather_edits(rows, len(sequences))
    found: list[int] = sample(logits.clone(), batch(len(sequences), temperature=0, edits=edits)).token_ids.tolist()
    return found


def random_case(num_rows: int = 200, length: int = 12) -> tuple[torch.Tensor, list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_rows, VOCAB, generator=generator)
    return logits, torch.randint(VOCAB, (num_rows, length), generator=generator).tolist()


@pytest.mark.parametrize("penalty", [0.7, 1.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, sequences = random_case()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(sequences), logits.clone()).argmax(-1)
    assert chosen(logits, sequences, 5, repetition_penalty=penalty) == expected.tolist()
    assert expected.tolist() != logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.6}, {"presence_penalty": 1.5}, {"frequency_penalty": -2}])
def test_frequency_and_presence_count_what_was_generated(sampling: dict[str, float]) -> None:
    logits, sequences = random_case()
    expected = []
    for row, tokens in enumerate(sequences):
        changed = logits[row].clone()
        for token in set(tokens[5:]):
            changed[token] -= sampling.get("frequency_penalty", 0) * tokens[5:].count(token)
            changed[token] -= sampling.get("presence_penalty", 0)
        expected.append(int(changed.argmax()))
    assert chosen(logits, sequences, 5, **sampling) == expected
    assert expected != logits.argmax(-1).tolist()


def test_bad_words_are_those_of_transformers() -> None:
    logits, sequences = random_case()
    likeliest = logits.argmax(-1).tolist()
    words = [[likeliest[0]], [sequences[1][-1], likeliest[1]], [*sequences[2][-2:], likeliest[2]], [*range(20)]]
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor(sequences), logits.clone()).argmax(-1)
    found = chosen(logits, sequences, 1, bad_words=tuple(map(tuple, words)))
    assert found == expected.tolist()
    assert all(found[row] != likeliest[row] for row in range(3))


def test_a_bad_word_that_began_in_the_prompt_is_not_one() -> None:
    logits, sequences = random_case(1, 3)
    word = (sequences[0][-1], int(logits[0].argmax()))
    assert chosen(logits, sequences, 3, bad_words=(word,)) == logits.argmax(-1).tolist()


def test_all_at_once_and_in_order() -> None:
    """The bias comes first, so the penalties see it."""
    logits = torch.tensor([[1.0, 0.9, 0.0, -1.0]])
    everything = {"logit_bias": ((2, 1.5),), "repetition_penalty": 2.0, "bad_words": ((0,),)}
    assert chosen(logits, [[3, 2]], 1, **everything) == [1]  # 0 is banned, 2 has (0 + 1.5) / 2, 3 has -1 * 2
    assert chosen(logits, [[3, 2]], 1, **everything, presence_penalty=-0.5) == [2]


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "logit_bias": ((3, 5.0), (4, -5.0))},
    {"repetition_penalty": 2.0, "logit_bias": tuple((token, 900.0) for token in range(20))},
    {"bad_words": tuple((token,) for token in range(0, 12))},
]


@pytest.mark.parametrize("sampling", PENALTIES)
def test_a_sequence_goes_on_the_same_way_from_any_point(sampling: dict[str, Any]) -> None:
    """Counts are derived from the tokens: a new attempt needs nothing else. Small vocabulary, so that tokens repeat."""
    prompt = [7, 8, 9, 7, 8]

    def run(tokens: list[int], num_tokens: int) -> list[int]:
        driven = make_engine(vocab_size=20)
        handle = driven.submit(tokens, num_tokens, num_prompt=len(prompt), **sampling)
        driven.run()
        return driven.tokens[handle]

    whole = run(prompt, 40)
    assert whole != reference(prompt, 40, vocab_size=20)
    for done in (1, 17):
        assert run(prompt + whole[:done], 40) == whole[done:]


@pytest.mark.parametrize("sampling", PENALTIES)
def test_preemption_changes_nothing(sampling: dict[str, Any]) -> None:
    prompts = [[start, 1, 2, 3, 4] for start in range(5, 9)]
    expected = [reference(prompt, 30, vocab_size=20, **sampling) for prompt in prompts]
    driven = make_engine(vocab_size=20, num_blocks=20)
    handles = [driven.submit(prompt, 30, **sampling) for prompt in prompts]
    driven.run()
    assert [driven.tokens[handle] for handle in handles] == expected
    driven.assert_baseline()
