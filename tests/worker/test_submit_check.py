"""Submits that no correct gateway sends are refused before the engine; all others do it no harm."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import GatewayId, WorkerId
from services.config import Pooling
from services.engine.engine import Engine
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request import Kind
from services.protocol.capsule import Capsule
from services.protocol.messages import HandTo, Submit
from services.protocol.sampling import FEW_ALTERNATIVES, MAX_ALTERNATIVES, SamplingParams
from services.worker.gateway_servicer import engine_request
from services.worker.submit_check import what_is_wrong

VOCAB = 50
PLAIN = Submit(1, Capsule(np.arange(5, dtype=np.int32), 5, SamplingParams(max_tokens=3)), timeout_s=60.0)
EMBED = replace(
    PLAIN, capsule=Capsule(np.arange(5, dtype=np.int32), 5, SamplingParams(max_tokens=0), pooling=Pooling.MEAN)
)

COUNTS = st.sampled_from([0, 1, 2, 3, 20, 128, 129, 2**31 - 6, 2**31 - 1, 2**32 - 1])
NUMBERS = st.sampled_from([-math.inf, -1e300, -1e30, -1.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 1e30, 1e300, math.inf, math.nan])
TOKENS = st.sampled_from([-(2**31), -1, 0, 7, VOCAB - 1, VOCAB, 2**31 - 1])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": COUNTS,
    "min_tokens": COUNTS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": st.sampled_from([-(2**31), -2, -1, 0, 1, 60, 2**31 - 1]),
    "min_p": NUMBERS,
    "seed": st.sampled_from([0, 2**64 - 1]),
    "num_logprobs": COUNTS,
    "num_prompt_logprobs": COUNTS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "stop_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
    "logit_bias": st.lists(st.tuples(TOKENS, NUMBERS), max_size=2).map(tuple),
    "allowed_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
    "logprob_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
    "bad_words": st.lists(st.lists(TOKENS, max_size=2).map(tuple), max_size=2).map(tuple),
}


def with_sampling(**sampling: Any) -> Submit:
    capsule = PLAIN.capsule
    return replace(PLAIN, capsule=replace(capsule, sampling=replace(capsule.sampling, **sampling)))


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 2**31 - 1},
        {"min_tokens": 2**31 - 1, "max_tokens": 2**31 - 1},
        {"max_tokens": 0},
        {"num_logprobs": 2**31 - 1},
        {"num_prompt_logprobs": 2**31 - 1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"presence_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"stop_token_ids": (VOCAB,)},
        {"stop_token_ids": (1,) * 5000},
        {"logit_bias": ((1, 1e300),)},
        {"bad_words": ((),)},
        {"allowed_token_ids": (-1,)},
        {"allowed_token_ids": (1,) * 51},
        {"logprob_token_ids": (VOCAB,), "num_logprobs": 1},
        {"logprob_token_ids": (1, 2), "num_logprobs": 1},
        {"logprob_token_ids": (1, 1), "num_logprobs": 2},
        {"logprob_token_ids": (1,)},
        {"bad_words": ((1,) * 70_000,)},
    ],
)
def test_a_value_out_of_range_is_refused(sampling: dict[str, Any]):
    assert what_is_wrong(PLAIN, VOCAB) is None
    assert what_is_wrong(with_sampling(**sampling), VOCAB)


def test_alternatives_are_bounded_for_each_token_and_for_the_whole_answer():
    """Few of a token are not counted together: an answer as long as the context may have them."""
    vocab, many = 200_000, MAX_ALTERNATIVES // 8

    def refused(num_choices: int = 0, **sampling: Any) -> bool:
        submit = replace(with_sampling(**sampling), seeds=tuple(range(num_choices)))
        return what_is_wrong(submit, vocab) is not None

    assert not refused(num_logprobs=FEW_ALTERNATIVES, max_tokens=100_000)
    assert not refused(num_logprobs=vocab, max_tokens=5)
    assert not refused(num_logprobs=many, max_tokens=8)
    assert not refused(num_logprobs=many, max_tokens=3, num_prompt_logprobs=many)
    assert not refused(2, num_logprobs=many, max_tokens=4)
    assert refused(num_logprobs=vocab + 1, max_tokens=1)
    assert refused(num_prompt_logprobs=vocab + 1)
    assert refused(num_logprobs=many, max_tokens=9)
    assert refused(num_logprobs=many, max_tokens=4, num_prompt_logprobs=many)
    assert refused(3, num_logprobs=many, max_tokens=4)


def test_a_salt_of_any_length_is_refused():
    salted = replace(PLAIN.capsule, cache_salt="a" * 1025)
    assert what_is_wrong(replace(PLAIN, capsule=salted), VOCAB)
    embedded = replace(salted, pooling=Pooling.MEAN, sampling=SamplingParams(max_tokens=0))
    assert "salt" in (what_is_wrong(replace(PLAIN, capsule=embedded, handoff=None, seeds=()), VOCAB) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"handoff": HandTo(WorkerId(1))},
        {"seeds": (1, 2)},
        {"timeout_s": math.nan},
        {"capsule": replace(EMBED.capsule, num_prompt=3)},
        {"capsule": replace(EMBED.capsule, second_text=5)},
        {"capsule": replace(PLAIN.capsule, second_text=2)},
        {"capsule": replace(EMBED.capsule, sampling=SamplingParams(max_tokens=1))},
        {"capsule": replace(EMBED.capsule, token_ids=np.array([VOCAB], np.int32), num_prompt=1)},
    ],
)
def test_a_prompt_to_embed_has_nothing_beside_it(changes: dict[str, Any]):
    assert what_is_wrong(EMBED, VOCAB) is None
    assert what_is_wrong(replace(EMBED, **changes), VOCAB)
    assert what_is_wrong(replace(EMBED, capsule=replace(EMBED.capsule, second_text=4)), VOCAB) is None
    assert engine_request(GatewayId(7), EMBED, 0.0).kind is Kind.EMBED


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_not_refused_does_not_end_the_engine(data: st.DataObject):
    """Up to three fields at once have values at the borders of their types."""
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, min_size=1, max_size=3))
    submit = with_sampling(**{name: data.draw(FIELDS[name]) for name in names})
    submit = replace(submit, seeds=(2**64 - 1, 0) if data.draw(st.booleans()) else ())
    if what_is_wrong(submit, VOCAB):
        return
    engine = Engine(
        SimulatedRunner(32, 4, vocab_size=VOCAB),
        DecodeScheduler(64),
        max_num_seqs=8,
        max_model_len=64,
        eos_token_ids=(3,),
    )
    engine.submit(engine_request(GatewayId(7), submit, 0.0))
    for _ in range(70):
        if not engine.step(0.0):
            break
    assert not engine.take_outputs().failed
    assert not engine.sequences.requests.ids
    engine.sequences.check()
