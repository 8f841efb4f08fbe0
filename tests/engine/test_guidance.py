"""Answers that match grammars, whatever happens to their sequences."""

import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from kvtransfer.ids import AttemptId
from kvtransfer.messages import FirstToken
from services.engine.engine import Engine
from services.engine.runner.base import SamplingBatch
from services.engine.runner.cpu.sampler import sample
from services.engine.runner.simulated import SimulatedRunner
from services.engine.sampling.guidance import Guidance, GuidedRow, GuidedSequence
from services.engine.sampling.logit_edits import gather_edits
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request import Kind
from services.engine.sequences.sequences import Sequences
from services.launcher import random_model
from services.protocol.model_files.open import open_model
from services.protocol.outcomes import FailureCode, FinishReason
from tests.engine.harness import GATEWAY, Driven, make_engine

EOS = 261  # tokens are bytes, and a few more
VOCAB = 262
PROMPT = list(b"Call me at ")
NUMBER = r"[0-9]{3}-[a-f]{2,9}(, [0-9]{3}-[a-f]{2,9}){0,3}"
GRAMMAR = LLMatcher.grammar_from_regex(NUMBER)
WARM: Any = {"temperature": 1.0}


def make(depth: int = 0, num_blocks: int = 64, max_num_seqs: int = 8) -> Driven:
    runner = SimulatedRunner(num_blocks, 4, vocab_size=VOCAB, late=depth > 0)
    engine = Engine(
        runner,
        DecodeScheduler(64),
        max_num_seqs=max_num_seqs,
        max_model_len=128,
        eos_token_ids=(EOS,),
        pipeline_depth=depth,
        guidance=Guidance("byte", VOCAB, (EOS,)),
    )
    return Driven(engine)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


def assert_matches(driven: Driven, handle: int, pattern: str = NUMBER) -> None:
    assert driven.finish[handle] == FinishReason.STOP
    assert re.fullmatch(pattern, text(driven.tokens[handle])), driven.tokens[handle]


@pytest.mark.parametrize("depth", [0, 1])
def test_only_allowed_tokens_are_generated_beside_guided_and_plain_sequences(depth: int):
    driven, few = make(depth), tuple(range(3, 256, 20))
    allowed = driven.submit(PROMPT, 20, allowed_token_ids=few)
    warm = driven.submit(PROMPT, 20, allowed_token_ids=few, seed=5, **WARM)
    guided = driven.submit(PROMPT, 60, grammar=GRAMMAR)
    plain = driven.submit(PROMPT, 20)
    driven.run()
    assert set(driven.tokens[allowed]) | set(driven.tokens[warm]) <= set(few)
    assert len(set(driven.tokens[warm])) > 1
    assert_matches(driven, guided)
    assert driven.tokens[plain] == alone(depth)


def alone(depth: int) -> list[int]:
    driven = make(depth)
    handle = driven.submit(PROMPT, 20)
    driven.run()
    return driven.tokens[handle]


def test_named_alternatives_are_reported_beside_the_likeliest_ones_of_others():
    driven = make()
    named = driven.submit(PROMPT, 5, num_logprobs=3, logprob_token_ids=(9, 7, 8))
    plain = driven.submit(PROMPT, 5, num_logprobs=2)
    driven.run()
    assert all([token for token, _ in found.top] == [9, 7, 8] for found in driven.logprobs[named])
    for token, found in zip(driven.tokens[plain], driven.logprobs[plain], strict=True):
        assert [other for other, _ in found.top] == [token, (token + 1) % VOCAB]


def test_allowed_tokens_and_a_grammar_both_hold():
    driven = make()
    few = driven.submit(PROMPT, 60, grammar=GRAMMAR, allowed_token_ids=(*b"12-ab", EOS), **WARM)
    driven.run()
    assert_matches(driven, few, r"[12]{3}-[ab]{2,9}")


def test_a_grammar_that_goes_on_with_no_allowed_token_fails():
    driven = make()
    driven.submit(PROMPT, 60, grammar=GRAMMAR, allowed_token_ids=tuple(b"12"))
    driven.run()
    (failure,) = driven.failures
    assert failure.code is FailureCode.UNSUPPORTED
    assert "allowed" in failure.detail
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_match_their_grammars_beside_others_that_have_none(depth: int):
    driven = make(depth)
    guided = [driven.submit(PROMPT, 60, grammar=GRAMMAR, seed=seed, **WARM) for seed in range(4)]
    greedy = driven.submit(PROMPT, 60, grammar=GRAMMAR)
    other = driven.submit(PROMPT, 20)
    plain = make(depth)
    alone = plain.submit(PROMPT, 20)
    driven.run()
    plain.run()
    for handle in (*guided, greedy):
        assert_matches(driven, handle)
    assert len({text(driven.tokens[handle]) for handle in guided}) > 1
    assert driven.tokens[other] == plain.tokens[alone]
    driven.assert_baseline()


def test_a_sequence_continues_on_another_worker_as_it_would_have_here():
    here = make()
    handle = here.submit(PROMPT, 60, grammar=GRAMMAR, seed=7, **WARM)
    here.run()
    whole = here.tokens[handle]
    for cut in range(1, len(whole)):
        there = make()
        rest = there.submit([*PROMPT, *whole[:cut]], 60, num_prompt=len(PROMPT), grammar=GRAMMAR, seed=7, **WARM)
        there.run()
        assert whole[:cut] + there.tokens[rest] == whole


@pytest.mark.parametrize("depth", [0, 1])
def test_choices_of_one_prompt_each_match(depth: int):
    driven = make(depth)
    handle = driven.submit(PROMPT, 60, grammar=GRAMMAR, seeds=(1, 2, 3), **WARM)
    driven.run()
    for choice in range(handle + 1, handle + 4):
        assert_matches(driven, choice)


@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_that_lose_their_blocks_come_back_in_their_grammars(depth: int, monkeypatch: pytest.MonkeyPatch):
    preempted: list[int] = []
    preempt = Sequences.preempt

    def counted(sequences: Sequences, slot: int) -> None:
        preempted.append(slot)
        preempt(sequences, slot)

    monkeypatch.setattr(Sequences, "preempt", counted)
    address = "([0-9a-f]{2}:){12}[0-9a-f]{2}"
    roomy, tight = make(depth), make(depth, num_blocks=30)
    for driven in (roomy, tight):
        assert not preempted
        for seed in range(4):
            driven.submit(PROMPT, 60, grammar=LLMatcher.grammar_from_regex(address), seed=seed, **WARM)
        driven.run()
        for handle in range(1, 5):
            assert_matches(driven, handle, address)
    assert preempted
    assert tight.tokens == roomy.tokens


def test_a_grammar_that_is_none_fails_its_request_alone():
    driven = make()
    bad = driven.submit(PROMPT, 60, grammar=LLMatcher.grammar_from_regex("a(b"))
    good = driven.submit(PROMPT, 60, grammar=GRAMMAR)
    driven.run()
    (failure,) = driven.failures
    assert (failure.handle, failure.code) == (bad, FailureCode.UNSUPPORTED)
    assert "unclosed group" in failure.detail
    assert bad not in driven.tokens
    assert_matches(driven, good)
    driven.assert_baseline()


def test_a_worker_without_guidance_refuses_a_request_for_it():
    runner = SimulatedRunner(64, 4, vocab_size=VOCAB)
    driven = Driven(Engine(runner, DecodeScheduler(64), max_num_seqs=4, max_model_len=128, eos_token_ids=(EOS,)))
    handle = driven.submit(PROMPT, 60, grammar=GRAMMAR)
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(handle, FailureCode.UNSUPPORTED)]


def test_a_least_number_of_tokens_never_leads_out_of_the_grammar():
    """It is above what the grammar has, or within it."""
    driven = make()
    long = driven.submit(PROMPT, 60, grammar=LLMatcher.grammar_from_regex("a{3}"), min_tokens=20)
    longer = driven.submit(PROMPT, 60, grammar=LLMatcher.grammar_from_regex("[ab]{2,40}"), min_tokens=20)
    driven.run()
    assert_matches(driven, long, "a{3}")
    assert_matches(driven, longer, "[ab]{19,40}")


A, B, C = (ord(letter) for letter in "abc")
ABC = LLMatcher.grammar_from_regex("a(b|c)a")
DEAD_ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "allowed tokens, all biased": (0, {"allowed_token_ids": (A, B), "logit_bias": ((A, -100.0), (B, -200.0))}),
    "allowed tokens, all bad words": (0, {"allowed_token_ids": (A, B), "bad_words": ((A,), (B,))}),
    "allowed tokens, biased or bad words": (
        0, {"allowed_token_ids": (A, B), "logit_bias": ((A, -100.0),), "bad_words": ((B,),)},
    ),
    "allowed tokens that end, and a least number": (
        0, {"allowed_token_ids": (EOS, A), "stop_token_ids": (A,), "min_tokens": 2},
    ),
    "an allowed token that a bad word ends after it": (1, {"allowed_token_ids": (A,), "bad_words": ((A, A),)}),
    "the vocabulary, biased": (0, {"logit_bias": tuple((token, -100.0) for token in range(VOCAB))}),
    "the vocabulary, as bad words": (0, {"bad_words": tuple((token,) for token in range(VOCAB))}),
    "the vocabulary but what ends, and a least number": (
        0, {"logit_bias": tuple((token, -100.0) for token in range(VOCAB - 1)), "min_tokens": 2},
    ),
    "a form, and allowed tokens beside it": (0, {"grammar": ABC, "allowed_token_ids": (B, C)}),
    "a form, and allowed tokens that end before it": (1, {"grammar": ABC, "allowed_token_ids": (A,)}),
    "a form, and its first token biased": (0, {"grammar": ABC, "logit_bias": ((A, -100.0),)}),
    "a form, and its first token a bad word": (0, {"grammar": ABC, "bad_words": ((A,),)}),
    "a form, and all that goes on biased": (1, {"grammar": ABC, "logit_bias": ((B, -100.0), (C, -100.0))}),
    "a form, and all that goes on a bad word": (1, {"grammar": ABC, "bad_words": ((A, B), (A, C))}),
    "a form, an allowed token, and a bad word": (
        2, {"grammar": ABC, "allowed_token_ids": (A, B), "bad_words": ((B, A),)},
    ),
    "a form, and its end biased": (3, {"grammar": ABC, "logit_bias": ((EOS, -100.0),)}),
}  # fmt: skip


@pytest.mark.few(16)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_tokens", "asked"), DEAD_ENDS.values(), ids=DEAD_ENDS)
def test_a_sequence_that_may_choose_no_token_fails_alone(
    num_tokens: int, asked: dict[str, Any], temperature: float, depth: int
):
    """Once, after the tokens that may come, and without one that must not."""
    driven = make(depth)
    stuck = driven.submit(PROMPT, 60, temperature=temperature, **asked)
    good, plain = driven.submit(PROMPT, 60, grammar=GRAMMAR), driven.submit(PROMPT, 20)
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(stuck, FailureCode.UNSUPPORTED)]
    assert len(driven.tokens.get(stuck, [])) == num_tokens
    assert_matches(driven, good)
    assert driven.tokens[plain] == alone(depth)
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_received_sequence_that_may_choose_no_token_fails_once(depth: int):
    """It is stuck in two steps that are under way at a time, and its slot is free after the first."""
    driven = make_engine(depth=depth)
    asked: dict[str, Any] = {"min_tokens": 5, "allowed_token_ids": (7, 8), "stop_token_ids": (7, 8)}
    for _ in range(2):
        handle = driven.submit([1, 2, 3, 4, 5], 20, kind=Kind.CONSUME, paired_with=9, **asked)
        id = AttemptId(GATEWAY, handle)
        driven.engine.sequences.requests.enqueue(id, 1)
        driven.engine.admit(driven.now)
        driven.engine.arrived(id, 2)
        driven.engine.ready(id, (FirstToken(handle, 7, None),))
        driven.failures.clear()
        driven.run()
        assert [failure.handle for failure in driven.failures] == [handle]
        assert driven.tokens[handle] == [7]
        driven.assert_baseline()


@pytest.mark.parametrize("seed", range(40))
def test_no_token_that_is_banned_comes_and_no_request_fails_while_one_may(seed: int):
    """Forms, allowed tokens, biases and bad words as chance has them, against the rules themselves."""
    chance = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdef", dtype=np.uint8).astype(int).tolist()
    pattern = "".join(f"[{''.join(chr(c) for c in chance.choice(letters, 3))}]{{1,3}}" for _ in range(3))
    asked: dict[str, Any] = {"grammar": LLMatcher.grammar_from_regex(pattern)} if chance.random() < 0.7 else {}
    if chance.random() < 0.6:
        asked["allowed_token_ids"] = (*chance.choice(letters, 4, replace=False).tolist(), EOS)
    biased = chance.choice(letters, 2, replace=False).tolist()
    asked["logit_bias"] = tuple((token, float(chance.choice([-100.0, -99.0, 5.0]))) for token in biased)
    asked["bad_words"] = tuple(
        tuple(chance.choice(letters, size).tolist()) for size in chance.integers(1, 4, size=chance.integers(0, 6))
    )
    driven = make()
    handle = driven.submit(PROMPT, 12, temperature=float(chance.integers(0, 2)), seed=seed, **asked)
    driven.run()
    tokens = driven.tokens.get(handle, [])
    for end in range(len(tokens)):
        assert tokens[end] in may_come(tokens[:end], asked)
    assert len(driven.failures) == (handle not in driven.finish)
    if driven.failures:
        assert may_come(tokens, asked) == set()


def may_come(tokens: list[int], asked: dict[str, Any]) -> set[int]:
    """The tokens that may follow, one looked at after the other."""
    allowed = set(asked.get("allowed_token_ids", range(VOCAB)))
    allowed -= {token for token, bias in asked["logit_bias"] if bias == -100.0}
    allowed -= {word[-1] for word in asked["bad_words"] if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]}
    if "grammar" not in asked:
        return allowed
    matcher = LLMatcher(LLTokenizer("byte", n_vocab=VOCAB, eos_token=EOS), asked["grammar"])
    assert not tokens or matcher.consume_tokens(tokens)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return allowed & set(np.flatnonzero(bits).tolist())


def test_an_answer_that_is_cut_off_begins_as_its_grammar_does():
    driven = make()
    handle = driven.submit(PROMPT, 2, grammar=GRAMMAR)
    driven.run()
    assert driven.finish[handle] == FinishReason.LENGTH
    assert re.fullmatch("[0-9]{2}", text(driven.tokens[handle]))


WORDS = 4096
DIGITS_AND_QUOTE = [*range(18, 28), 4]
FORCED = LLMatcher.grammar_from_regex(r'\{"temperature": (true|false|[0-9]{1,4}), "description": "[^"]{0,40}"\}')


class Answers:
    """Greedy rows that have a grammar, but for the last; the first of them is never to choose one of a few tokens."""

    def __init__(self, guidance: Guidance, num_guided: int) -> None:
        self._guidance = guidance
        forced = guidance.grammars.ask(FORCED, (GATEWAY, ""))
        assert forced is not None
        self._sequences = [GuidedSequence(guidance, forced) for _ in range(num_guided)]
        self.tokens: list[list[int]] = [[] for _ in self._sequences]

    def advance(self, logits: torch.Tensor, *, settles: bool) -> list[int]:
        """Samples the next token of each row, and returns them all."""
        rows = []
        for row, (sequence, tokens) in enumerate(zip(self._sequences, self.tokens, strict=True)):
            new = tokens[sequence.num_followed :]
            sequence.num_followed += len(new)
            banned = np.arange(20, 24) if row == 0 else np.zeros(0, dtype=np.int64)
            rows.append(GuidedRow(row, sequence, new, banned))
        masks = self._guidance.masks(rows)
        if not settles:
            masks = replace(masks, settle=None)
        batch = SamplingBatch.greedy(len(logits))
        batch.edits = gather_edits([], len(logits), masks)
        assert batch.settles is settles
        sampled: list[int] = sample(logits.clone(), batch).token_ids.tolist()
        for tokens, token in zip(self.tokens, sampled, strict=False):
            tokens.append(token)
        return sampled


@pytest.fixture(scope="module")
def words() -> Guidance:
    """The grammars of a vocabulary in which a text that is forced has one way to be written."""
    tokenizer = open_model(random_model.made()).tokenizer().decode()
    return Guidance(tokenizer, WORDS, (2,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_are_settled_are_the_likeliest_of_the_masked_ones(words: Guidance, dtype: torch.dtype):
    """Rows that may choose one token only, rows whose likeliest token must not come, ends, and what is banned."""
    settled, masked = Answers(words, 12), Answers(words, 12)
    chance = torch.Generator().manual_seed(4)
    for _step in range(60):
        logits = torch.randn(13, WORDS, generator=chance).to(dtype)
        logits[:, DIGITS_AND_QUOTE] += 6  # some likeliest tokens may come
        assert settled.advance(logits, settles=True) == masked.advance(logits, settles=False)
    assert all(len(set(tokens)) > 5 for tokens in settled.tokens)
    assert any(2 in tokens for tokens in settled.tokens)


def test_others_pass_a_request_while_its_grammar_is_compiled():
    """No step waits for a grammar that takes long: this one is followed for its first token in a second or more."""
    driven, compiled = make(), threading.Event()
    assert driven.engine.sequences.batch.guidance is not None
    driven.engine.sequences.batch.guidance.grammars.on_compiled = compiled.set
    slow = driven.submit(PROMPT, 60, grammar=LLMatcher.grammar_from_regex("((a{100}){100}){100}"))
    plain = driven.submit(PROMPT, 20)
    while plain not in driven.finish:
        assert driven.step()
    assert not compiled.is_set()
    assert slow not in driven.tokens, "it is not admitted so far"
    assert compiled.wait(60)
    driven.run()
    (failure,) = driven.failures
    assert failure.code is FailureCode.UNSUPPORTED
    driven.assert_baseline()
