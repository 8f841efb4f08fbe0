"""Rows that get several tokens in a step: whatever drafts are, no token comes that would not come without them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from kvtransfer.ids import GatewayId
from services.engine.engine import Engine
from services.engine.runner.base import StepTokens
from services.engine.runner.simulated import SimulatedRunner
from services.engine.sampling.guidance import Guidance
from services.engine.schedulers.base import Scheduler
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.outputs import StepRows
from services.protocol.frames import Load
from services.worker.frame_builder import build_frame
from tests.engine.drafting import MOST, DraftingScheduler
from tests.engine.harness import Driven

EOS, VOCAB = 261, 262  # tokens are bytes, and a few more
GRAMMAR = LLMatcher.grammar_from_regex(r"[0-9]{3}-[a-f]{2,9}(, [0-9]{3}-[a-f]{2,9}){0,3}")
WORDS = LLMatcher.grammar_from_lark('start: ("one" | "other" | "only") (" " start)?')
WARM: Any = {"temperature": 1.0, "seed": 11}

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": WARM,
    "stop tokens": {"stop_token_ids": tuple(range(0, 250, 9)), **WARM},
    "stop tokens after so many": {"stop_token_ids": tuple(range(0, 250, 3)), "min_tokens": 7, **WARM},
    "logprobs": {"num_logprobs": 3},
    "named logprobs": {"num_logprobs": 2, "logprob_token_ids": (5, 6)},
    "bias": {"logit_bias": ((70, 5.0), (71, 9.0))},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": tuple((n, 50.0) for n in range(9))},
    "bad words": {"bad_words": ((3, 4), (5,), (6, 7, 8)), "allowed_token_ids": (3, 4, 5, 6, 7, 8)},
    "few tokens": {"allowed_token_ids": tuple(b"abc"), **WARM},
    "grammar, greedy": {"grammar": GRAMMAR},
    "grammar, drawn": {"grammar": GRAMMAR, **WARM},
    "words": {"grammar": WORDS},
    "grammar with a limit": {"grammar": GRAMMAR, "min_tokens": 20, **WARM},
    "grammar of few tokens": {"grammar": GRAMMAR, "allowed_token_ids": (*b"12-ab, ", EOS), **WARM},
    "grammar that is stuck": {"grammar": WORDS, "allowed_token_ids": tuple(b"on ")},
    "choices": {"seeds": (1, 2, 3), "temperature": 1.0},
}


@dataclass
class Tallied(Driven):
    """Counts the rows by their number of tokens."""

    counts: list[int] = field(default_factory=list)
    rows: list[StepRows] = field(default_factory=list)

    def take(self) -> None:
        before = self.engine._outputs.rows
        self.rows += before
        self.counts += [count for rows in before for count in rows.counts.tolist()]
        super().take()


def make(scheduler: Scheduler, *, depth: int = 0, window: int | None = None, num_blocks: int = 400) -> Tallied:
    runner = SimulatedRunner(num_blocks, 4, vocab_size=VOCAB, window=window, late=depth > 0)
    return Tallied(
        Engine(
            runner,
            scheduler,
            max_num_seqs=64,
            max_model_len=128,
            eos_token_ids=(EOS,),
            pipeline_depth=depth,
            guidance=Guidance("byte", VOCAB, (EOS,)),
        )
    )


def submit_all(driven: Driven, names: list[str], max_tokens: int = 30) -> dict[int, str]:
    """Submits a request of each kind; returns their names by handle."""
    names_of: dict[int, str] = {}
    for index, name in enumerate(names):
        asked = {"min_tokens": 0, **ASKED[name]}
        handle = driven.submit([*b"Call ", index], max_tokens, **asked)
        names_of |= dict.fromkeys(range(handle, handle + 1 + len(asked.get("seeds", ()))), name)
    return names_of


def said(driven: Driven) -> tuple[Any, ...]:
    failures = sorted((failure.handle, failure.code, failure.detail) for failure in driven.failures)
    return driven.tokens, driven.finish, driven.logprobs, driven.cached, failures


@pytest.fixture(scope="module")
def alone() -> Driven:
    """What each kind of request says without drafts."""
    driven = make(DecodeScheduler(64))
    submit_all(driven, list(ASKED))
    driven.run()
    assert len(driven.failures) == 1
    return driven


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_no_request_says_anything_else(alone: Driven, right: float, depth: int) -> None:
    starts = dict(alone.num_prompt)

    def expected(handle: int, position: int) -> list[int]:
        return alone.tokens.get(handle, [])[position - starts[handle] :]

    scheduler = DraftingScheduler(64, expected, right=right, vocab_size=VOCAB)
    driven = make(scheduler, depth=depth)
    names = submit_all(driven, list(ASKED))
    driven.run()
    driven.assert_baseline()
    for handle, name in names.items():
        assert driven.tokens.get(handle) == alone.tokens.get(handle), name
    assert said(driven) == said(alone)
    assert scheduler.num_planned > 100
    assert set(driven.counts) == ({1} if right == 0 else set(range(1, MOST + 2)))


@pytest.mark.parametrize("name", list(ASKED))
def test_a_request_that_is_alone_says_nothing_else(alone: Driven, name: str) -> None:
    """In a step of its own: one that is greedy settles its tokens without masks."""
    plain = make(DecodeScheduler(64))
    submit_all(plain, [name])
    plain.run()
    for seed in range(5):
        starts = dict(plain.num_prompt)

        def expected(handle: int, position: int, starts: dict[int, int] = starts) -> list[int]:
            return plain.tokens.get(handle, [])[position - starts[handle] :]

        driven = make(DraftingScheduler(64, expected, right=0.8, vocab_size=VOCAB, seed=seed))
        submit_all(driven, [name])
        driven.run()
        assert said(driven) == said(plain)
        driven.assert_baseline()


def test_blocks_behind_a_window_are_freed_and_none_that_is_needed() -> None:
    plain = make(DecodeScheduler(64), window=6, num_blocks=40)
    submit_all(plain, ["plain", "drawn"], 90)
    plain.run()
    starts = dict(plain.num_prompt)
    scheduler = DraftingScheduler(
        64, lambda handle, at: plain.tokens[handle][at - starts[handle] :], right=0.9, vocab_size=VOCAB
    )
    driven = make(scheduler, window=6, num_blocks=16)
    submit_all(driven, ["plain", "drawn"], 90)
    driven.run()
    assert said(driven)[:2] == said(plain)[:2]


def test_frames_carry_the_count_of_each_row() -> None:
    """Also where rows of several gateways lie in one step, with logprobs for some of them."""
    plain = make(DecodeScheduler(64))
    submit_all(plain, ["logprobs", "plain", "named logprobs"])
    plain.run()
    starts = dict(plain.num_prompt)
    scheduler = DraftingScheduler(
        64, lambda handle, at: plain.tokens[handle][at - starts[handle] :], right=1.0, vocab_size=VOCAB
    )
    driven = make(scheduler)
    submit_all(driven, ["logprobs", "plain", "named logprobs"])
    driven.run()
    for rows in driven.rows:
        rows.gateway, rows.gateways = None, rows.handles.astype(np.uint64)
    assert max(driven.counts) > 1
    for handle, tokens in plain.tokens.items():
        frame = build_frame(driven.rows, GatewayId(handle), [], Load())
        told_rows = list(frame.rows())
        assert [row.handle for row in told_rows] == [handle] * len(told_rows)
        assert [token for row in told_rows for token in row.tokens] == tokens
        positions = [row.position + nth for row in told_rows for nth in range(len(row.tokens))]
        assert positions == list(range(starts[handle], starts[handle] + len(tokens)))
        told = [each for row in told_rows for each in row.logprobs or []]
        assert told == plain.logprobs.get(handle, [])
        assert [bool(row.finish) for row in told_rows] == [False] * (len(told_rows) - 1) + [True]


def test_the_tokens_of_a_step_travel_as_bytes() -> None:
    random = np.random.default_rng(3)
    for num_rows, num_blocks, num_queries in ((1, 1, 0), (3, 7, 5), (2, 0, 1)):
        counts = random.integers(1, 5, num_rows)
        starts = np.cumsum([0, *counts], dtype=np.int32)
        tokens = StepTokens(
            token_ids=random.integers(-9, 1000, starts[-1], dtype=np.int32),
            positions=random.integers(0, 1000, starts[-1], dtype=np.int32),
            query_starts=starts,
            seq_lens=random.integers(1, 1000, num_rows, dtype=np.int32),
            block_tables=random.integers(0, 99, (num_rows, num_blocks), dtype=np.int32),
            queries=random.integers(0, starts[-1], num_queries),
            token_types=random.integers(0, 2, starts[-1] * (num_queries == 5), dtype=np.int32),
        )
        again = StepTokens.from_bytes(tokens.to_bytes())
        for name in StepTokens.__slots__:
            left, right = getattr(tokens, name), getattr(again, name)
            assert (left.dtype, left.shape, left.tolist()) == (right.dtype, right.shape, right.tolist()), name
