"""The whole model on Triton's kernels: what GpuRunner computes is what `transformers` computes, recorded or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from services.config import Pooling
from services.engine.engine import Engine
from services.engine.models.architectures import parse_model_config
from services.engine.models.kv_scales import KvScales
from services.engine.models.makers import Makers
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.base import SamplingBatch, StepInput, StepTokens, spare_blocks
from services.engine.runner.gpu import gpu_runner
from services.engine.runner.gpu.device import CudaDevice, Device, HostDevice
from services.engine.runner.gpu.experts import stacked_experts
from services.engine.runner.gpu.gpu_runner import GpuRunner, StepLimits
from services.engine.runner.load_plan import kv_layout
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.self_check import SelfCheck
from services.protocol.model_files.open import open_model
from services.protocol.outcomes import FailureCode
from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, long_rope, plant, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, possible_ranks, prompts_of
from tests.engine.row_starts import assert_told_where_rows_begin
from tests.engine.stepping import run_greedy
from tests.engine.wide_logprobs import assert_right_beside_narrow_ones
from tests.seeds import first_of

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa2-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-gqa3-80-biases": (
        "llama",
        {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 80, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen3-gqa4-128": ("qwen3", {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 128}),
    "gemma2-gqa2-biases": ("gemma2", {"sliding_window": 20, "attention_bias": True, "attn_logit_softcapping": 2.0}),
    "gemma3-mqa-24": ("gemma3", {"sliding_window": 20, "num_key_value_heads": 1, "head_dim": 24}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 20}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe-shared-expert": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3-moe-one-expert": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 1}),
    "qwen3-some-layers-slide": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "granite-multipliers": (
        "granite",
        {"embedding_multiplier": 1.9, "attention_multiplier": 0.3, "residual_multiplier": 0.83, "logits_scaling": 2},
    ),
    "deepseek-v2-lite-one-product-yarn": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3-groups": ("deepseek_v3", {"v_head_dim": 24, "num_hidden_layers": 3}),
    "deepseek-v3-halves-odd-heads-never-expanded": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 60,
            "kv_lora_rank": 18,
            "v_head_dim": 40,
        },
    ),
    "olmo2-gqa3-llama3-rope": (
        "olmo2",
        {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 48, "rope_parameters": LLAMA3_ROPE},
    ),
    "phi3-longrope-partial": (
        "phi3",
        {"hidden_size": 192, "partial_rotary_factor": 0.75, "sliding_window": 24, **long_rope(context=512, size=18)},
    ),
    "smollm3-layers-without-rope": ("smollm3", {"no_rope_layers": [0, 1, 0], "num_hidden_layers": 3}),
    "opt-norm-first-tied": ("opt", {"tie_word_embeddings": True}),
    "opt-norm-after-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}


def make_runner(
    directory: Path,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_scales: KvScales | None = None,
    **limits: Any,
) -> GpuRunner:
    """A runner whose pool is full of NaN, on a GPU where there is one. kv_scales: its KV is FP8."""
    device: Device = CudaDevice() if torch.cuda.is_available() else HostDevice()
    config = parse_model_config(open_model(directory).config())
    with open_tensors(directory, config, device.torch) as tensors:
        weights = load_weights(tensors, config, dtype, makers=Makers(experts=stacked_experts))
    layout = kv_layout(config, block_size, dtype if kv_scales is None else torch.float8_e4m3fn)
    num_all = spare_blocks(num_blocks, block_size).stop
    pool = torch.full((num_all, layout.block_bytes), 0xFF, dtype=torch.uint8, device=device.torch)
    steps = StepLimits(**{"max_num_seqs": 5, "max_num_batched_tokens": 256, "max_model_len": 256} | limits)
    return GpuRunner(config, weights, pool, layout, device, steps, kv_scales=kv_scales)


@pytest.mark.parametrize("name", first_of(1, SHAPES))
def test_greedy_tokens_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    """Mixed lengths in one batch, odd chunks, scattered blocks; steps of chunks, and recorded ones that decode."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    prompts, reference = prompts_of([1, 19, 33]), Reference(directory)
    rows = run_greedy(make_runner(directory), prompts, 6, chunk=17, num_logprobs=4)  # the second leaves the window
    for prompt, row in zip(prompts, rows, strict=True):
        tokens, logprobs = reference.run(prompt, 6)
        assert row.generated == tokens
        for (sampled, top_ids, top), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=1e-4)
            assert top == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
            assert expected[top_ids].tolist() == pytest.approx(top, abs=1e-4)
    assert len({token for row in rows for token in row.generated}) >= 6, "tokens that repeat prove little"


@pytest.mark.long
def test_pairs_of_experts_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step ahead; recorded steps have rows of padding, which count nowhere. The last layer gets fewer tokens."""
    directory = write_checkpoint(tmp_path / "model", "mixtral", num_hidden_layers=3)
    *others, first, second, third = prompts_of([4, 19, 9, 4, 19, 9])
    prompts, reference = [first, second, third], Reference(directory)
    runner = make_runner(directory, block_size=8, max_num_seqs=8)
    engine = Engine(runner, DecodeScheduler(24), max_num_seqs=8, max_model_len=64, eos_token_ids=(), pipeline_depth=1)
    driven, told = Driven(engine), list[np.ndarray]()
    imbalance = engine.expert_imbalance
    assert imbalance is not None
    monkeypatch.setattr(imbalance, "note", told.append)

    def run(prompts: list[list[int]], num_tokens: int) -> list[int]:
        driven.now += 6
        handles = [driven.submit(prompt, num_tokens) for prompt in prompts]
        driven.run()
        return handles

    run(others, 6)  # which records the steps
    run([[5]], 1)
    handles = run(prompts, 6)
    run([[9]], 1)
    computed = [prompt + driven.tokens[handle][:-1] for prompt, handle in zip(prompts, handles, strict=True)]
    expected = np.sum([reference.expert_pairs(tokens) for tokens in (*computed, [9])], axis=0)
    counted = told[-1] - told[-3]
    assert counted[:2].tolist() == expected[:2].tolist()


@pytest.mark.long
def test_latents_in_both_forms_and_behind_cached_prefixes(tmp_path: Path) -> None:
    """Rows of 48 new tokens are expanded: chunks behind others, beside rows that decode, and a second turn."""
    directory = write_checkpoint(tmp_path / "model", "deepseek_v3", first_k_dense_replace=2)
    reference, prompts = Reference(directory), prompts_of([1, 37, 130])
    runner = make_runner(directory, block_size=8, max_num_batched_tokens=128)
    rows = run_greedy(runner, prompts, 6, chunk=50)
    assert [row.generated for row in rows] == [reference.tokens(prompt, 6) for prompt in prompts]
    scheduler = DecodeScheduler(128, prefill_chunk=64)
    limits: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 256, "eos_token_ids": ()}
    driven = Driven(Engine(runner, scheduler, **limits, pipeline_depth=1))
    first = driven.submit(prompts[2], 4)
    driven.run()
    turn = [*prompts[2], *driven.tokens[first], *prompts[2][:60]]
    second = driven.submit(turn, 4)
    driven.run()
    assert driven.cached[second] >= 128
    assert driven.tokens[second] == reference.tokens(turn, 4)
    driven.assert_baseline()


@pytest.mark.long
@pytest.mark.parametrize(("family", "fp8"), [("llama", False), ("opt", False), ("llama", True), ("deepseek_v3", False)])
def test_bfloat16_and_fp8_kv_stay_near_float32(family: str, fp8: bool, tmp_path: Path) -> None:
    """The first tokens of some prompts: their log-probabilities are near those of float32."""
    directory = write_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    prompts, reference = prompts_of([5, 20, 37]), Reference(directory)
    scales = KvScales(torch.tensor([[0.05, 0.1], [0.2, 0.04]]), torch.tensor([[0.01, 0.02], [0.03, 0.015]]))
    runner = make_runner(directory, dtype=torch.bfloat16, kv_scales=scales if fp8 else None)
    rows = run_greedy(runner, prompts, 2, chunk=16, num_logprobs=0)
    for prompt, row in zip(prompts, rows, strict=True):
        _, logprobs = reference.run(prompt, 1)
        assert row.logprobs[0][0] == pytest.approx(float(logprobs[0, row.generated[0]]), abs=0.5)
        assert float(logprobs[0].max() - logprobs[0, row.generated[0]]) < 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-gqa2-tied", "opt-norm-after-projected"])
def test_embeddings_equal_the_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    """In chunks, one step ahead, beside a prompt of which a token is wanted with scores of its own."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    reference, prompts = Reference(directory), prompts_of([1, 20, 33])
    runner = make_runner(directory, block_size=8)
    engine = Engine(runner, PrefillScheduler(24), max_num_seqs=5, max_model_len=128, eos_token_ids=(), pipeline_depth=1)
    driven = Driven(engine)
    scored = driven.submit(prompts[1], 1, num_prompt_logprobs=1)
    handles = {
        (pooling, index): driven.embed(prompt, pooling) for pooling in Pooling for index, prompt in enumerate(prompts)
    }
    driven.run()
    for (pooling, index), handle in handles.items():
        states = reference.hidden_states(prompts[index])
        wanted = {Pooling.LAST: states[-1], Pooling.MEAN: states.mean(dim=0), Pooling.CLS: states[0]}[pooling]
        assert len(wanted) == runner.embedding_size
        assert driven.embeddings[handle].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    assert driven.tokens[scored] == reference.tokens(prompts[1], 1)
    assert len(driven.scores[scored]) == len(prompts[1]) - 1
    driven.assert_baseline()


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_one_step_ahead_generates_the_same(depth: int, tmp_path: Path) -> None:
    """Requests come and go, prompts are computed beside decoding rows, and some tokens the host knows only later."""
    directory = write_checkpoint(tmp_path / "model")
    scheduler = DecodeScheduler(64, prefill_chunk=16)
    engine = Engine(
        make_runner(directory, block_size=8),
        scheduler,
        max_num_seqs=5,
        max_model_len=128,
        eos_token_ids=(),
        pipeline_depth=depth,
    )
    driven, prompts = Driven(engine), prompts_of([30, 5, 41])
    handles = [driven.submit(prompts[0], 12), driven.submit(prompts[1], 5)]
    for _ in range(4):
        driven.step()
    handles.append(driven.submit(prompts[2], 7))
    branched = driven.submit(prompts[1], 6, seeds=(1, 2), num_prompt_logprobs=2)
    driven.run()
    reference = Reference(directory)
    for handle, prompt, count in zip(handles, prompts, (12, 5, 7), strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, count)
    assert [driven.tokens[branched + choice] for choice in (1, 2)] == [reference.tokens(prompts[1], 6)] * 2
    for score, token, logprobs in zip(
        driven.scores[branched], prompts[1][1:], reference.scores(prompts[1]), strict=True
    ):
        assert score.sampled == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert score.rank in possible_ranks(logprobs, token)
    driven.assert_baseline()


@pytest.mark.long
def test_slices_behind_windows_serve_other_rows(tmp_path: Path) -> None:
    """One step ahead. Two answers fit that would not in whole blocks; then a turn that hits what is left of one."""
    directory = write_checkpoint(tmp_path / "model", "gemma2", num_hidden_layers=4, sliding_window=20)
    runner = make_runner(directory, block_size=8, num_blocks=36)
    groups = runner.layout.groups
    assert groups is not None
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 96, "eos_token_ids": ()}
    driven = Driven(Engine(runner, DecodeScheduler(64, prefill_chunk=16), **limits, pipeline_depth=1))
    reference, prompts, lengths = Reference(directory), prompts_of([10, 40]), (70, 45)
    assert sum(len(prompt) + n for prompt, n in zip(prompts, lengths, strict=True)) // 8 * groups.num_slices > 36
    handles = [driven.submit(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    driven.run()
    for handle, prompt, length in zip(handles, prompts, lengths, strict=True):
        assert driven.tokens[handle] == reference.tokens(prompt, length)
    turn = prompts[1] + driven.tokens[handles[1]] + [7]
    again = driven.submit(turn, 4)
    driven.run()
    assert driven.cached[again] >= 80
    assert driven.tokens[again] == reference.tokens(turn, 4)
    driven.assert_baseline()


@pytest.mark.long
@pytest.mark.parametrize("depth", first_of(1, [1, 0]))
def test_penalties_and_bans_see_every_token(depth: int, tmp_path: Path) -> None:
    """No token comes twice under a penalty that outweighs everything; under a bias that does, only one comes."""
    directory = write_checkpoint(tmp_path / "model")
    engine = Engine(
        make_runner(directory),
        DecodeScheduler(64, prefill_chunk=64),
        max_num_seqs=4,
        max_model_len=128,
        eos_token_ids=(),
        pipeline_depth=depth,
    )
    driven, prompt = Driven(engine), prompts_of([9])[0]
    handle = driven.submit(prompt, 20, presence_penalty=1e4)
    biased = driven.submit(prompt, 6, logit_bias=((5, -1e4), (7, 60.0)))
    driven.run()
    assert len(set(driven.tokens[handle])) == 20
    assert set(driven.tokens[biased]) == {7}


@pytest.mark.long
def test_a_draw_is_a_function_of_seed_and_position(tmp_path: Path) -> None:
    """Alone, in company, with and without a pipeline."""
    directory = write_checkpoint(tmp_path / "model")
    prompts, found = prompts_of([9, 12, 20]), []
    for depth, company in ((0, False), (1, True)):
        engine = Engine(
            make_runner(directory, split_keys=128),
            DecodeScheduler(64, prefill_chunk=16),
            max_num_seqs=5,
            max_model_len=128,
            eos_token_ids=(),
            pipeline_depth=depth,
        )
        driven = Driven(engine)
        handle = driven.submit(prompts[0], 12, temperature=1.0, top_k=50, top_p=0.9, seed=11)
        if company:
            driven.submit(prompts[1], 9)
            driven.submit(prompts[2], 15, temperature=0.7, seed=3)
        driven.run()
        found.append(driven.tokens[handle])
    assert found[0] == found[1]
    assert len(set(found[0])) > 4


def test_rows_that_get_several_tokens_or_none_are_no_step_of_decoding(tmp_path: Path) -> None:
    """As many sampled tokens as rows and as query tokens, but both of the first row: a prompt's last token with two
    choices, beside one token of a prompt that goes on.
    """
    runner = make_runner(write_checkpoint(tmp_path / "model"))
    tokens = StepTokens(
        token_ids=np.array([5, 9], dtype=np.int32),
        positions=np.zeros(2, dtype=np.int32),
        query_starts=np.array([0, 1, 2], dtype=np.int32),
        seq_lens=np.ones(2, dtype=np.int32),
        block_tables=np.array([[3], [4]], dtype=np.int32),
    )
    runner.launch(StepInput.of(tokens, np.array([0, 1]), SamplingBatch.greedy(2)))
    first, second = runner.collect().token_ids
    assert first != second
    runner.launch(StepInput.of(tokens, np.zeros(2, dtype=np.int64), SamplingBatch.greedy(2)))
    assert runner.collect().token_ids.tolist() == [first, first]


def test_a_block_is_copied_after_all_steps(tmp_path: Path) -> None:
    runner = make_runner(write_checkpoint(tmp_path / "model"))
    row = run_greedy(runner, prompts_of([20]), 3, chunk=64)[0]
    source, destination = (int(block) for block in (row.blocks[0], np.setdiff1d(np.arange(64), row.blocks)[0]))
    pool = runner.kv_memory().pool
    assert not torch.equal(pool[source], pool[destination])
    runner.copy_block(source, destination)
    assert torch.equal(pool[source], pool[destination])


@pytest.mark.long
def test_warm_up_leaves_a_runner_that_computes_the_same(allow_trial_steps: Callable[[], None], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    warm = make_runner(directory, max_num_seqs=2, max_num_batched_tokens=24)
    warm.warm_up()
    allow_trial_steps()
    prompts = prompts_of([7, 20])
    assert [row.generated for row in run_greedy(warm, prompts, 4, chunk=12)] == [
        row.generated for row in run_greedy(make_runner(directory), prompts, 4, chunk=12)
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: of NaN, which is what is tested
def test_what_is_not_finite_fails_the_request_that_has_it(tmp_path: Path) -> None:
    """A token with NaN for an embedding, in prompts of one chunk and of two, sampled, scored, edited and embedded."""
    directory = write_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    runner = make_runner(plant(directory, "model.embed_tokens.weight", 300, float("nan")))
    limits: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 256, "eos_token_ids": ()}
    driven = Driven(Engine(runner, DecodeScheduler(16, prefill_chunk=16), **limits, pipeline_depth=1))
    sound = driven.submit([7, 8, 9], 2)
    failing = [
        driven.submit([*range(10), 300, *range(10)], 5, temperature=1.0, top_k=5),
        driven.submit([300, 4], 5, num_prompt_logprobs=1, logit_bias=((3, -100.0),), allowed_token_ids=(2, 3)),
    ]
    driven.run()
    assert driven.tokens == {sound: Reference(directory).run([7, 8, 9], 2)[0]}
    driven.engine = Engine(runner, PrefillScheduler(16), **limits)
    failing += [driven.embed([300, *range(20)], pooling) for pooling in (Pooling.LAST, Pooling.MEAN)]
    driven.run()
    assert sorted(failure.handle for failure in driven.failures) == failing
    assert {failure.code for failure in driven.failures} == {FailureCode.NOT_FINITE}
    driven.assert_baseline()


def test_a_check_passes_again_and_touches_no_block_of_the_pool(tmp_path: Path) -> None:
    runner = make_runner(write_checkpoint(tmp_path / "model", num_hidden_layers=1), num_blocks=3)
    SelfCheck(runner, 12).learn()
    assert (runner._pool[:3] == 0xFF).all()
    assert not (runner._pool[3] == 0xFF).all()


@pytest.mark.long
def test_all_of_the_vocabulary_beside_rows_with_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a step, some of which have such a row."""
    monkeypatch.setattr(gpu_runner, "_SCORED_AT_ONCE", 7)
    directory = write_checkpoint(tmp_path / "model")
    assert_right_beside_narrow_ones(make_runner(directory), Reference(directory), depth=1)


@pytest.mark.long
def test_a_forward_pass_is_told_where_rows_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(write_checkpoint(tmp_path / "model"))
    assert_told_where_rows_begin(runner, runner._model, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama-scorer", "qwen3-scorer"])
def test_a_score_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """In chunks, several prompts in a step, after a self-check that samples nothing."""
    directory = write_checkpoint(tmp_path / "model", family)
    runner = make_runner(directory)
    assert (runner.embedding_size, runner.generates) == (1, False)
    check = SelfCheck(runner, 256)
    check.learn()
    check.repeat()
    scheduler = PrefillScheduler(40)
    engine = Engine(runner, scheduler, max_num_seqs=4, max_model_len=256, eos_token_ids=(), pipeline_depth=1)
    driven, prompts = Driven(engine), prompts_of([1, 30, 90])
    handles = [driven.embed(prompt, Pooling.LAST) for prompt in prompts]
    driven.run()
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    for prompt, handle in zip(prompts, handles, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].tolist()
        assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=1e-4)
    driven.assert_baseline()
