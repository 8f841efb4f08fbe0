"""The model on real (tiny, random) weights: what TorchRunner computes is what `transformers` computes."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.attention.cpu_attention import CpuAttention, CpuPlan
from services.engine.engine import Engine
from services.engine.kernels.cpu import team
from services.engine.kernels.cpu.team import rows_of_a_block
from services.engine.models import decoder
from services.engine.runner.base import StepInput, StepTokens
from services.engine.runner.cpu import torch_runner
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request_table import State
from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, long_rope, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, possible_ranks, prompts_of
from tests.engine.row_starts import assert_told_where_rows_begin
from tests.engine.stepping import Row, run_greedy, step
from tests.engine.wide_logprobs import assert_right_beside_narrow_ones

NUM_TOKENS = 64
OF_KERNELS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.9,
    "attention_multiplier": 0.171,
    "residual_multiplier": 0.83,
    "logits_scaling": 1.7,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha-16": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa2-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-gqa3-biases": (
        "llama",
        {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 64, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mqa-128-llama3-rope": ("llama", {"num_key_value_heads": 1, "head_dim": 128, "rope_parameters": LLAMA3_ROPE}),
    "llama-80": ("llama", {"head_dim": 80}),
    "qwen3-gqa2-16": ("qwen3", {}),
    "qwen3-gqa4-128-tied": (
        "qwen3",
        {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3-bias-sharded": ("qwen3", {"attention_bias": True, "max_shard_size": "100KB"}),
    "qwen2-gqa2": ("qwen2", {}),
    "qwen2-tied-yarn-all-layers-slide": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 0,
        },
    ),
    "qwen2-gqa3-some-layers-slide": (
        "qwen2",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 3,
        },
    ),
    "qwen3-tied-bias-layers-slide-by-turns": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "ministral-first-layer-sees-all": (
        "ministral",
        {
            "num_hidden_layers": 3,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma2-gqa2-16": ("gemma2", {"sliding_window": 20}),
    "gemma2-gqa3-24-caps-all-settings": (
        "gemma2",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 10,
            "rms_norm_eps": 1e-3,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        },
    ),
    "gemma2-mqa-80-tied-no-caps": (
        "gemma2",
        {
            "seed": 2,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 700,
        },
    ),
    "gemma2-all-layers-slide": ("gemma2", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}),
    "gemma3-gqa2-16": ("gemma3", {"sliding_window": 20, "num_hidden_layers": 7}),
    "gemma3-gqa3-24-all-settings": (
        "gemma3",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 30,
            "rms_norm_eps": 1e-3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-mqa-128-tied-yarn": (
        "gemma3",
        {
            "seed": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 500,
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "gemma3-no-layer-slides": ("gemma3", {"head_dim": 40, "layer_types": ["full_attention"] * 2}),
    "gpt-oss-gqa2-16": ("gpt_oss", {"sliding_window": 20}),
    "gpt-oss-gqa3-24-all-settings": (
        "gpt_oss",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "swiglu_limit": 2.0,
            "swiglu_alpha": 1.1,
            "rms_norm_eps": 1e-3,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "gpt-oss-mqa-64-tied-one-expert": (
        "gpt_oss",
        {
            "num_key_value_heads": 1,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gpt-oss-no-biases-all-layers-slide": (
        "gpt_oss",
        {"attention_bias": False, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    ),
    "mistral-window": ("mistral", {"sliding_window": 24, "num_hidden_layers": 3}),
    "mistral-window-of-a-block": ("mistral", {"sliding_window": 16}),
    "mistral-no-window-linear-rope": (
        "mistral",
        {"sliding_window": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 24}),
    "mixtral-7-of-7-experts": ("mixtral", {"num_local_experts": 7, "num_experts_per_tok": 7, "head_dim": 80}),
    "qwen2-moe-no-biases-every-second-layer": (
        "qwen2_moe",
        {"qkv_bias": False, "decoder_sparse_step": 2, "num_hidden_layers": 3, "norm_topk_prob": True},
    ),
    "qwen2-moe-tied-narrow-experts": (
        "qwen2_moe",
        {"tie_word_embeddings": True, "moe_intermediate_size": 10, "num_experts": 33, "num_experts_per_tok": 5},
    ),
    "qwen3-moe-bias-sharded-dense-first": (
        "qwen3_moe",
        {"attention_bias": True, "max_shard_size": "100KB", "mlp_only_layers": [0], "num_experts": 5},
    ),
    "qwen3-moe-window-yarn-one-expert": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "rope_parameters": YARN_ROPE,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "head_dim": 32,
        },
    ),
    "deepseek-v2-no-experts": ("deepseek_v2", {"first_k_dense_replace": 2, "mlp_bias": True}),
    "deepseek-v2-one-product-yarn-groups": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3-halves-odd-heads-experts-everywhere": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 60,
            "kv_lora_rank": 18,
            "v_head_dim": 40,
        },
    ),
    "deepseek-v3-tied-yarn-biases": (
        "deepseek_v3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "v_head_dim": 24,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 4.0},
        },
    ),
    "granite-gqa2-tied": ("granite", {"tie_word_embeddings": True, **MULTIPLIERS}),
    "granite-all-settings": (
        "granite",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 48,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN_ROPE,
            "rms_norm_eps": 1e-3,
            **MULTIPLIERS,
        },
    ),
    "granite-multipliers-of-1": ("granite", {"num_key_value_heads": 4, "attention_multiplier": 0.25}),
    "granite-mqa-128": (
        "granite",
        {"num_key_value_heads": 1, "head_dim": 128, **MULTIPLIERS, "logits_scaling": 0.9, "residual_multiplier": 2},
    ),
    "olmo2-gqa2": ("olmo2", {}),
    "olmo2-mqa-128-tied": ("olmo2", {"num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": True}),
    "olmo2-gqa3-llama3-rope": (
        "olmo2",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 48,
            "rope_parameters": LLAMA3_ROPE,
            "rms_norm_eps": 1e-3,
        },
    ),
    "olmo2-mha-one-layer": ("olmo2", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "smollm3-gqa2-every-other": ("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3}),
    "smollm3-tied-all-layers-slide-without-rope": (
        "smollm3",
        {
            "tie_word_embeddings": True,
            "no_rope_layers": [0, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "smollm3-gqa3-all-settings": (
        "smollm3",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "head_dim": 48,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN_ROPE,
            "no_rope_layers": [0, 1, 0],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "smollm3-mqa-128": ("smollm3", {"num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 4}),
    "phi3-gqa2": ("phi3", {}),
    "phi3-window-partial-tied": (
        "phi3",
        {"sliding_window": 24, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    "phi3-gqa3-longrope-partial-all-settings": (
        "phi3",
        {
            "num_attention_heads": 6,
            "hidden_size": 288,
            "rms_norm_eps": 1e-3,
            "sliding_window": 100,
            **long_rope(context=512, size=18),
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-gqa2-80-two-numbers-turn": ("phi3", {"hidden_size": 320, "partial_rotary_factor": 0.025}),
    "opt-norm-first-tied": ("opt", {"tie_word_embeddings": True}),
    "opt-norm-after-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-final-norm-no-bias": ("opt", {"_remove_final_layer_norm": True, "enable_bias": False}),
}


QUICK = {  # one or two of each family: shapes have kernels of their own, which are compiled first
    "deepseek-v2-one-product-yarn-groups",
    "deepseek-v3-halves-odd-heads-experts-everywhere",
    "gemma2-gqa3-24-caps-all-settings",
    "gemma3-gqa3-24-all-settings",
    "gpt-oss-gqa3-24-all-settings",
    "granite-all-settings",
    "llama-gqa3-biases",
    "llama-mqa-128-llama3-rope",
    "ministral-first-layer-sees-all",
    "mistral-window",
    "mixtral-window",
    "olmo2-gqa3-llama3-rope",
    "opt-norm-after-projected",
    "phi3-gqa3-longrope-partial-all-settings",
    "qwen2-moe-no-biases-every-second-layer",
    "qwen2-tied-yarn-all-layers-slide",
    "qwen3-bias-sharded",
    "qwen3-moe-window-yarn-one-expert",
    "smollm3-gqa3-all-settings",
}


def load(directory: Path, **options: Any) -> TorchRunner:
    """A runner with a small pool, on one thread: for tiny matrices more of them only wait for each other."""
    chosen = {"kv_memory_bytes": 8 << 20, "num_threads": 1, **options}
    runner = load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, **chosen)).runner
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A checkpoint with nothing special, and its reference."""
    directory = write_checkpoint(tmp_path_factory.mktemp("plain"))
    return directory, Reference(directory)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_greedy_tokens_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    """Mixed lengths in one batch, odd chunks, scattered blocks; every family and many shapes."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    prompts, reference = prompts_of([1, 37, 90]), Reference(directory)
    rows = run_greedy(load(directory), prompts, NUM_TOKENS, chunk=13, num_logprobs=4)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens, logprobs = reference.run(prompt, NUM_TOKENS)
        assert len(set(tokens)) >= 10, "a reference that repeats itself proves little"
        assert row.generated == tokens
        for (sampled, top_ids, top), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=1e-4)
            assert top == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
            assert expected[top_ids].tolist() == pytest.approx(top, abs=1e-4)


@pytest.mark.few(3)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("block_size", [8, 64])
def test_chunks_and_blocks_do_not_change_tokens(chunk: int, block_size: int, plain: tuple[Path, Reference]) -> None:
    directory, reference = plain
    prompts = prompts_of([50, 131])
    rows = run_greedy(load(directory, block_size=block_size), prompts, 24, chunk=chunk)
    assert [row.generated for row in rows] == [reference.tokens(prompt, 24) for prompt in prompts]


def test_a_prompt_longer_than_an_attention_tile(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    prompts = prompts_of([700, 300, 5])
    rows = run_greedy(load(directory), prompts, 8, chunk=600)
    reference = Reference(directory)
    assert [row.generated for row in rows] == [reference.tokens(prompt, 8) for prompt in prompts]


def test_a_row_runs_alone_as_in_a_batch(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    prompts = prompts_of([9, 33, 64, 100])
    together = [row.generated for row in run_greedy(load(directory), prompts, 20, chunk=50)]
    alone = [run_greedy(load(directory), [prompt], 20, chunk=50)[0].generated for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_unwritten_blocks_hold_does_not_matter(dtype: str, tmp_path: Path) -> None:
    """A pool full of NaN gives the tokens that a zeroed one gives."""
    directory = write_checkpoint(tmp_path / "model")
    prompts = prompts_of([3, 40, 77])
    clean, poisoned = load(directory, dtype=dtype), load(directory, dtype=dtype)
    poisoned.kv_memory().array[:] = 0xFF  # every float of it is NaN
    expected = run_greedy(clean, prompts, 20, chunk=11, num_logprobs=0)
    rows = run_greedy(poisoned, prompts, 20, chunk=11, num_logprobs=0)
    assert [row.generated for row in rows] == [row.generated for row in expected]
    assert np.isfinite([found[0] for row in rows for found in row.logprobs]).all()


@pytest.fixture(params=[("llama", 1024), ("llama", 1000), ("qwen2_moe", 1024)], ids=lambda it: f"{it[0]}-{it[1]}")
def kernels(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose layers are all kernels'; AMX does not take the output layer of the second."""
    family, vocab_size = request.param
    shape = OF_KERNELS | {"max_position_embeddings": 2048, "vocab_size": vocab_size}
    return write_checkpoint(tmp_path / "model", family, **shape)


def test_rows_in_blocks_are_computed_as_all_at_once(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts, to the bit: the KV of all layers, and what is sampled."""
    sizes: list[int | None] = []

    def block(rows: int, row_bytes: int, num_threads: int) -> int | None:
        sizes.append(rows_of_a_block(rows, row_bytes, num_threads))
        return sizes[-1]

    found = []
    for chosen in (block, lambda *_: None):
        monkeypatch.setattr(team, "rows_of_a_block", chosen)
        runner = load(kernels)
        rows = run_greedy(runner, prompts_of([193, 462, 700]), 3, chunk=460, num_logprobs=2)
        found.append(([row.tokens for row in rows], [row.logprobs for row in rows], runner.kv_memory().array.copy()))
    assert any(sizes)
    assert found[0][:2] == found[1][:2]
    assert np.array_equal(found[0][2], found[1][2])


def test_recorded_steps_compute_what_others_do(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, their chunks beside others that decode, and decoding, to the bit."""
    replayed, num_steps = [], 0
    replay, launch = team.Team.replay, TorchRunner.launch

    def spied(self: team.Team, key: Hashable, inputs: Sequence[torch.Tensor], body: Callable[[], Any]) -> Any:
        replayed.append(key)
        return replay(self, key, inputs, body)

    def counted(self: TorchRunner, step: StepInput) -> None:
        nonlocal num_steps
        num_steps += 1
        launch(self, step)

    monkeypatch.setattr(team.Team, "replay", spied)
    monkeypatch.setattr(TorchRunner, "launch", counted)

    def run() -> list[tuple[list[int], list[Any]]]:
        """Runs prompts, then others of the same lengths, whose steps are recorded by then."""
        runner, prompts = load(kernels), prompts_of([5, 40, 77])
        rows = [
            row
            for some in (prompts, [prompt[::-1] for prompt in prompts])
            for row in run_greedy(runner, some, 20, chunk=64, num_logprobs=2)
        ]
        return [(row.tokens, row.logprobs) for row in rows]

    recorded = run()
    assert len(replayed) == num_steps
    assert len(set(replayed)) <= num_steps / 2
    monkeypatch.setattr(decoder, "_MAX_RECORDED_TOKENS", 0)
    assert run() == recorded


@pytest.mark.parametrize(
    "shape",
    [
        "llama-gqa3-biases",
        "qwen3-gqa4-128-tied",
        "mistral-window",
        "llama-80",
        pytest.param("gemma3-mqa-128-tied-yarn", marks=pytest.mark.long),
        "bfloat16",
    ],
)
def test_few_queries_get_what_they_get_among_all(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, repeated, and so many that rows run in blocks. All KV is written to the bit, even with none.

    With so few that the last layer's attention is computed for them alone, by another kernel, they are rounded
    differently.
    """
    num_tokens, (family, changes) = 600, {**SHAPES, "bfloat16": ("llama", OF_KERNELS)}[shape]
    write_checkpoint(tmp_path, family, **(changes | {"max_position_embeddings": num_tokens}))
    narrow, narrowed = CpuAttention.narrow, list[bool]()

    def spied(self: CpuAttention, plan: CpuPlan, tokens: torch.Tensor, layer: int) -> CpuPlan | None:
        found = narrow(self, plan, tokens, layer)
        narrowed.append(found is not None)
        return found

    monkeypatch.setattr(CpuAttention, "narrow", spied)

    def run(queries: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        runner = load(tmp_path)
        starts, lens = np.array([0, num_tokens], dtype=np.int32), np.array([num_tokens], dtype=np.int32)
        num_blocks = (num_tokens // runner.layout.block_size + 1) * runner.layout.num_slices
        tables = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
        ids, positions = np.array(prompts_of([num_tokens])[0], np.int32), np.arange(num_tokens, dtype=np.int32)
        tokens = StepTokens(ids, positions, starts, lens, tables, np.array(queries, dtype=np.int64))
        with torch.inference_mode():
            hidden = runner._model.forward(runner._input(tokens))
        return hidden, runner.kv_memory().array.copy()

    of_all, kv = run(range(num_tokens))
    for queries in ([590], [5, 3, 5, 599], list(range(1, num_tokens, 2)), []):
        hidden, written = run(queries)
        if narrowed[-1]:
            tolerance = {"atol": 0.05, "rtol": 0.05} if hidden.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(hidden, of_all[queries], **tolerance)
        else:
            assert torch.equal(hidden, of_all[queries])
        assert np.array_equal(written, kv)
    assert narrowed == [True, True, False, True]


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", torch.bfloat16, 0.5),
        ("qwen3", torch.bfloat16, 0.5),
        ("gemma2", torch.bfloat16, 0.5),
        pytest.param("gemma3", torch.bfloat16, 0.5, marks=pytest.mark.long),
        pytest.param("gpt_oss", torch.bfloat16, 0.5, marks=pytest.mark.long),
        ("mistral", torch.float16, 0.1),
        ("opt", torch.float16, 0.1),
    ],
)
def test_half_precision_stays_near_float32(family: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """The first sampled token of many prompts: its log-probabilities are near those of float32."""
    directory = write_checkpoint(tmp_path / "model", family, dtype=dtype)
    prompts = prompts_of([5, 20, 41, 80])
    rows, reference = run_greedy(load(directory), prompts, 1, chunk=32, num_logprobs=0), Reference(directory)
    for prompt, row in zip(prompts, rows, strict=True):
        _, logprobs = reference.run(prompt, 1)
        assert row.logprobs[0][0] == pytest.approx(float(logprobs[0, row.generated[0]]), abs=tolerance)
        assert float(logprobs[0].max() - logprobs[0, row.generated[0]]) < tolerance


def test_what_is_generated_behind_a_window_needs_no_room(tmp_path: Path) -> None:
    """Two sequences in a pool that cannot hold both whole, NaN wherever nobody holds it; then a turn that hits both."""
    directory = write_checkpoint(tmp_path / "model", "mistral", sliding_window=24)
    block_bytes = load(directory, block_size=8).layout.block_bytes
    runner = load(directory, block_size=8, kv_memory_bytes=26 * block_bytes)
    scheduler = DecodeScheduler(64, prefill_chunk=16)
    driven = Driven(Engine(runner, scheduler, max_num_seqs=4, max_model_len=200, eos_token_ids=()))
    sequences, reference = driven.engine.sequences, Reference(directory)
    prompts = prompts_of([40, 70])
    handles = [driven.submit(prompt, 90) for prompt in prompts]
    while driven.step():
        runner.kv_memory().array[sequences.pool._free[: sequences.pool._num_free]] = 0xFF
        assert not sequences.requests.in_state(State.PREEMPTED)
    assert [driven.tokens[handle] for handle in handles] == [reference.tokens(prompt, 90) for prompt in prompts]
    turn = prompts[1] + driven.tokens[handles[1]] + [7, 8, 9]
    again = driven.submit(turn, 20)
    driven.run()
    assert driven.cached[again] > 100
    assert driven.tokens[again] == reference.tokens(turn, 20)
    driven.assert_baseline()


def test_choices_and_scores_of_a_prompt(plain: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy choices over one prompt are all the reference's, in blocks that they share and in copies."""
    monkeypatch.setattr(torch_runner, "_SCORED_AT_ONCE", 7)
    directory, reference = plain
    scheduler = DecodeScheduler(32, prefill_chunk=13)
    engine = Engine(load(directory, block_size=8), scheduler, max_num_seqs=8, max_model_len=128, eos_token_ids=())
    driven, prompt = Driven(engine), prompts_of([61])[0]
    handle = driven.submit(prompt, 20, seeds=(1, 2, 3), num_prompt_logprobs=3)
    driven.run()
    assert [driven.tokens[handle + choice] for choice in (1, 2, 3)] == [reference.tokens(prompt, 20)] * 3
    expected = reference.scores(prompt)
    assert len(driven.scores[handle]) == len(expected)
    for score, token, logprobs in zip(driven.scores[handle], prompt[1:], expected, strict=True):
        assert score.sampled == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)
        assert score.rank in possible_ranks(logprobs, token)
    driven.assert_baseline()


def test_a_step_that_samples_nothing(tmp_path: Path) -> None:
    """A chunk in the middle of a prompt has no output row, and logits are not computed for it."""
    runner = load(write_checkpoint(tmp_path / "model"))
    rows = run_greedy(runner, prompts_of([30]), 1, chunk=8)
    assert len(rows[0].generated) == 1


def test_kv_lies_in_the_pool_as_the_layout_says(tmp_path: Path) -> None:
    """[block, head, layer, K or V, slot, dim]: only the slots of computed tokens are written, in the row's blocks."""
    runner = load(write_checkpoint(tmp_path / "model"))
    row = run_greedy(runner, prompts_of([19]), 2, chunk=100)[0]
    pool = runner.kv_memory().array.view(np.float32).reshape(runner.layout.shape(runner.num_blocks))
    assert row.computed == 20
    written = (pool != 0).any(axis=-1)
    assert written[row.blocks[0]].all()
    assert written[row.blocks[1]][..., :4].all()
    assert not written[row.blocks[1]][..., 4:].any()
    assert np.flatnonzero(written.any(axis=(1, 2, 3, 4))).tolist() == sorted(row.blocks.tolist())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kv_in_the_pool_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """K before V, rotated by absolute positions. Workers exchange these bytes: agreeing with oneself is not enough."""
    directory = write_checkpoint(tmp_path / "model", family)
    runner, prompt = load(directory), prompts_of([41])[0]
    row = run_greedy(runner, [prompt], 1, chunk=17)[0]
    pool = torch.from_numpy(runner.kv_memory().array).view(torch.float32).view(runner.layout.shape(runner.num_blocks))
    blocks = pool[torch.from_numpy(row.blocks).long()].permute(3, 2, 1, 0, 4, 5)  # K or V, layer, head, block, slot
    found = blocks.flatten(3, 4)[:, :, :, : len(prompt)]
    for layer, (keys, values) in enumerate(Reference(directory).kv(prompt)):
        torch.testing.assert_close(found[0, layer], keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[1, layer], values, atol=1e-4, rtol=1e-4)


def test_moved_blocks_continue_elsewhere_with_the_same_tokens(tmp_path: Path) -> None:
    """The bytes of a sequence's blocks, copied to other blocks of another runner, are all that it needs."""
    directory = write_checkpoint(tmp_path / "model")
    here, there = load(directory), load(directory)
    prompt = prompts_of([45])[0]
    whole = run_greedy(here, [prompt], 30, chunk=16)[0]
    first = run_greedy(here, [prompt], 1, chunk=16)[0]
    moved = Row(tokens=list(first.tokens), blocks=np.array([7, 3, 9, 1, 20], np.int32), num_prompt=45, computed=45)
    num_blocks = len(first.blocks)
    there.kv_memory().array[moved.blocks[:num_blocks]] = here.kv_memory().array[first.blocks]
    while len(moved.generated) < 30:
        step(there, [moved], 16)
    assert moved.generated == whole.generated


def test_all_of_the_vocabulary_beside_rows_with_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a step, some of which have such a row."""
    monkeypatch.setattr(torch_runner, "_SCORED_AT_ONCE", 7)
    directory = write_checkpoint(tmp_path / "model")
    assert_right_beside_narrow_ones(load(directory), Reference(directory), depth=0)


def test_a_forward_pass_is_told_where_rows_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(write_checkpoint(tmp_path / "model"))
    assert_told_where_rows_begin(runner, runner._model, monkeypatch)
