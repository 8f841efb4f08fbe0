"""The imbalance between experts: what a runner counts is what `transformers` chooses, over a time that slides."""

from pathlib import Path

import numpy as np
import pytest

from services.config import DeviceKind, Kernels
from services.config.engine import EngineConfig
from services.engine.engine import Engine
from services.engine.expert_imbalance import ExpertImbalance, Imbalance, imbalance_of, pairs_of_ranks
from services.engine.runner.load import load_runner
from services.engine.schedulers.decode import DecodeScheduler
from tests.checkpoints import plant, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, prompts_of

NUM_TOKENS = 12


def test_the_busiest_expert_over_the_mean_of_each_layer() -> None:
    assert imbalance_of(np.array([[5, 5, 5], [6, 0, 9]])) == Imbalance(worst=9 / 5, mean=(1 + 9 / 5) / 2)
    assert imbalance_of(np.array([[0, 7]])) == Imbalance(worst=2, mean=2)
    assert imbalance_of(np.array([[4, 2], [0, 0]])) == Imbalance(worst=4 / 3, mean=4 / 3)
    assert imbalance_of(np.zeros((2, 3), dtype=np.int64)) is None


def test_a_step_tells_its_counts_every_five_seconds() -> None:
    imbalance = ExpertImbalance()
    assert [imbalance.asks(now) for now in (1.0, 1.1, 5.9, 6.0, 6.1, 30.0)] == [True, False, False, True, False, True]


def test_the_figures_are_of_the_last_minute_and_stay_while_nothing_is_computed() -> None:
    imbalance, pairs = ExpertImbalance(), np.zeros((1, 2), dtype=np.int64)

    def told(now: float, first: int, second: int) -> float | None:
        assert imbalance.asks(now)
        pairs[0] += (first, second)
        imbalance.note(pairs.copy())
        return None if imbalance.latest is None else imbalance.latest.worst

    assert told(0, 100, 0) is None, "what came before the first step that tells is of no known time"
    assert told(10, 30, 10) == 40 * 0.75 / 20
    assert told(60, 10, 30) == 1
    assert told(70, 0, 10) == 1.6, "10 of 50: what was computed until second 10 does not count any more"
    assert told(1000, 5, 5) == 1, "the last count before the minute is where it begins"
    assert told(1100, 0, 0) == 1


def test_ranks_have_the_pairs_of_their_experts() -> None:
    pairs = np.array([[5, 0, 5, 2], [0, 0, 0, 0], [0, 0, 9, 0]])
    ranks = [range(1), range(1, 2), range(2, 4)]
    assert pairs_of_ranks(pairs, ranks).tolist() == [[5, 0, 7], [0, 0, 0], [0, 0, 9]]
    imbalance = ExpertImbalance(ranks)
    for now, told in ((0, 0 * pairs), (10, pairs), (20, pairs)):
        assert imbalance.asks(now)
        imbalance.note(told.copy())
    assert imbalance.latest_of_ranks == Imbalance(worst=3, mean=(7 * 3 / 12 + 3) / 2)
    assert imbalance.latest == imbalance_of(pairs)
    without = ExpertImbalance()
    for now, told in ((0, 0 * pairs), (10, pairs)):
        assert without.asks(now)
        without.note(told)
    assert without.latest_of_ranks is None, "no rank has whole experts"


def latest(engine: Engine) -> Imbalance | None:
    assert engine.expert_imbalance is not None
    return engine.expert_imbalance.latest


@pytest.mark.parametrize("kernels", Kernels)
def test_an_engine_tells_the_imbalance_of_what_it_computed(kernels: Kernels, tmp_path: Path) -> None:
    """In two layers a bias sends all tokens to 2 of 9 experts, in the one between they go where they go. The last one
    may get only those tokens whose successors are wanted.
    """
    directory = write_checkpoint(tmp_path / "model", "gpt_oss", num_hidden_layers=3, sliding_window=20)
    for layer in (0, 2):
        for expert in (3, 7):
            plant(directory, f"model.layers.{layer}.mlp.router.bias", expert, 1e3)
    config = EngineConfig(
        model=directory, block_size=4, kv_memory_bytes=1 << 20, device=DeviceKind.CPU, kernels=kernels
    )
    runner = load_runner(config).runner
    engine = Engine(runner, DecodeScheduler(32, prefill_chunk=7), max_num_seqs=4, max_model_len=64, eos_token_ids=())
    driven, reference = Driven(engine), Reference(directory)
    driven.submit([5, 6], 1)
    driven.run()
    assert latest(engine) is None, "nothing was computed after the step that told its counts first"
    prompts = prompts_of([19, 8])
    handles = [driven.submit(prompt, NUM_TOKENS) for prompt in prompts]
    driven.run()
    driven.now += 6
    last = driven.submit([9], 1)  # the step that tells
    driven.run()
    computed = [prompt + driven.tokens[handle][:-1] for prompt, handle in zip(prompts, handles, strict=True)]
    assert [len(driven.tokens[handle]) for handle in (*handles, last)] == [NUM_TOKENS, NUM_TOKENS, 1]
    expected = np.sum([reference.expert_pairs(tokens) for tokens in (*computed, [9])], axis=0)
    assert expected[0, [3, 7]].tolist() == [len(computed[0] + computed[1]) + 1] * 2
    between = 9 * expected[1].max() / expected[1].sum()
    assert 1 < between < 4.5
    found = latest(engine)
    assert found is not None
    assert found.worst == 4.5
    assert found.mean == pytest.approx((2 * 4.5 + between) / 3)


def test_a_dense_model_counts_nothing(tmp_path: Path) -> None:
    config = EngineConfig(
        model=write_checkpoint(tmp_path / "model"), block_size=4, kv_memory_bytes=1 << 20, device=DeviceKind.CPU
    )
    runner = load_runner(config).runner
    engine = Engine(runner, DecodeScheduler(32), max_num_seqs=4, max_model_len=64, eos_token_ids=())
    assert not runner.has_experts
    assert engine.expert_imbalance is None
