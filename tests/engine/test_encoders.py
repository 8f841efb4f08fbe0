"""Encoders, and decoders that see both ways: hidden states as `transformers` has them, pooled, in batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from services.config import DeviceKind, Pooling
from services.config.engine import EngineConfig
from services.engine.runner.base import StepInput
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.engine.runner.load_plan import plan_load
from services.engine.self_check import SelfCheck, SelfCheckError
from services.protocol.model_files.base import ModelError
from services.protocol.outcomes import FailureCode
from tests.checkpoints import edit_json, plant, write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.test_embeddings import driven_over, pooled

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert-3-heads-of-20-relu": (
        "bert",
        {"hidden_size": 60, "num_attention_heads": 3, "hidden_act": "relu", "layer_norm_eps": 1e-3},
    ),
    "bert-three-types-tanh": ("bert", {"type_vocab_size": 3, "hidden_act": "gelu_new", "num_hidden_layers": 5}),
    "bert-one-head-silu": ("bert", {"num_attention_heads": 1, "hidden_act": "silu", "intermediate_size": 33}),
    "roberta": ("roberta", {}),
    "roberta-one-type-padding-7": ("roberta", {"type_vocab_size": 1, "pad_token_id": 7}),
    "roberta-8-heads": ("roberta", {"num_attention_heads": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "roberta-padding-0": ("roberta", {"pad_token_id": 0, "layer_norm_eps": 1e-5, "intermediate_size": 200}),
    "xlm-roberta": ("xlm-roberta", {"layer_norm_eps": 1e-5}),
    "xlm-roberta-2-heads": ("xlm-roberta", {"num_attention_heads": 2, "max_shard_size": "100KB"}),
    "xlm-roberta-relu": ("xlm-roberta", {"hidden_act": "relu", "type_vocab_size": 1}),
    "xlm-roberta-4-layers": ("xlm-roberta", {"num_hidden_layers": 4, "pad_token_id": 2}),
    "modernbert": ("modernbert", {"num_hidden_layers": 4, "local_attention": 16}),
    "modernbert-near-alone": (
        "modernbert",
        {"layer_types": ["sliding_attention"] * 2, "local_attention": 7, "norm_eps": 1e-3},
    ),
    "modernbert-ropes": (
        "modernbert",
        {
            "num_hidden_layers": 3,
            "local_attention": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "modernbert-biases": (
        "modernbert",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "hidden_activation": "silu",
            "num_attention_heads": 2,
            "global_attn_every_n_layers": 2,
            "local_attention": 20,
        },
    ),
    "llama-both-ways": ("llama", {"is_causal": False}),
    "qwen3-both-ways-8-of-2": ("qwen3", {"is_causal": False, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen2-both-ways": ("qwen2", {"is_causal": False, "num_hidden_layers": 3}),
}

# Those of the default run.
DEFAULT = ("bert-3-heads-of-20-relu", "roberta-one-type-padding-7", "modernbert-biases", "qwen3-both-ways-8-of-2")


def load(directory: Path, **options: Any) -> TorchRunner:
    chosen = {"num_threads": 1, "block_size": 8, **options}
    runner = load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, **chosen)).runner
    assert isinstance(runner, TorchRunner)
    return runner


def states_of(directory: Path, prompt: list[int]) -> torch.Tensor:
    """The hidden states that `transformers` computes in float64, from which its float32 is as far as ours,
    [tokens, size]. With `sdpa` it would ignore `is_causal`.
    """
    model = AutoModel.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def unit(vector: np.ndarray) -> list[float]:
    lengthened: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return lengthened


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_embeddings_equal_the_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    """Every way of pooling, rows of one token and of many, some of equal length, more than a step's budget."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    prompts = prompts_of([1, 8, 37, 90, 37, 21])
    runner = load(directory)
    driven = driven_over(runner, 70)
    handles = {(pooling, index): driven.embed(prompts[index], pooling) for pooling in Pooling for index in range(6)}
    driven.run()
    for index, prompt in enumerate(prompts):
        states = states_of(directory, prompt)
        for pooling in Pooling:
            found = driven.embeddings[handles[pooling, index]]
            assert found.dtype == np.float32
            expected = np.array(pooled(states, pooling))
            assert found.tolist() == pytest.approx(expected.tolist(), abs=2e-5)
            assert unit(found) == pytest.approx(unit(expected), abs=1e-5)
    driven.assert_baseline()


def test_a_padding_token_in_a_prompt_has_the_position_of_padding(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "roberta", pad_token_id=7)
    prompt = [5, 7, 9, 7, 7, 11]
    driven = driven_over(load(directory), 50)
    handles = [driven.embed(each, Pooling.LAST) for each in ([3, 4], prompt, [7, 8])]
    driven.run()
    expected = states_of(directory, prompt)[-1].tolist()
    assert driven.embeddings[handles[1]].tolist() == pytest.approx(expected, abs=1e-5)


def test_long_rows_of_near_attention_are_computed_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each border of tiles and of what a token reaches."""
    monkeypatch.setattr("services.engine.attention.row_attention.TILE", 16)
    directory = write_checkpoint(tmp_path / "model", "modernbert", local_attention=10, num_hidden_layers=3)
    runner = load(directory)
    for length in (5, 6, 7, 15, 16, 17, 32, 33, 100):
        (prompt,) = prompts_of([length])
        driven = driven_over(runner, 1000)
        handle = driven.embed(prompt, Pooling.MEAN)
        driven.run()
        expected = states_of(directory, prompt).mean(dim=0).tolist()
        assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=1e-5), length


def test_prompts_are_whole_in_steps_and_share_them_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is longer than the budget has a step of its own."""
    steps: list[list[int]] = []
    launch = TorchRunner.launch

    def counted(self: TorchRunner, step: StepInput) -> None:
        steps.append(np.diff(step.tokens.query_starts).tolist())
        launch(self, step)

    monkeypatch.setattr(TorchRunner, "launch", counted)
    driven = driven_over(load(write_checkpoint(tmp_path / "model", "bert")), 40)
    for prompt in prompts_of([10, 100, 20, 15, 9, 1]):
        driven.embed(prompt, Pooling.MEAN)
    driven.run()
    assert sorted(length for step in steps for length in step) == [1, 9, 10, 15, 20, 100]
    assert [100] in steps
    assert all(sum(step) <= 40 for step in steps if step != [100])
    assert len(steps) == 3
    assert driven.engine.sequences.pool.num_used == 0, "no block was ever taken"


def test_a_model_that_sees_both_ways_refuses_to_generate(tmp_path: Path) -> None:
    driven = driven_over(load(write_checkpoint(tmp_path / "model", "bert")), 40)
    driven.submit([3, 4, 5], 1)
    driven.run()
    assert [failure.code for failure in driven.failures] == [FailureCode.UNSUPPORTED]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def test_half_precision_is_near_float32(dtype: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "modernbert", dtype=getattr(torch, dtype))
    (prompt,) = prompts_of([60])
    driven = driven_over(load(directory), 100)
    handle = driven.embed(prompt, Pooling.MEAN)
    driven.run()
    expected = states_of(directory, prompt).mean(dim=0).tolist()
    assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=0.05)


def test_damaged_weights_are_found_at_the_start(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "bert")
    check = SelfCheck(load(directory), 256)
    check.learn()
    check.repeat()
    plant(directory, "encoder.layer.1.output.dense.weight", 3, float("nan"))
    with pytest.raises(SelfCheckError, match="not finite"):
        SelfCheck(load(directory), 256).learn()


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("roberta", {"pad_token_id": 511}, "max_position_embeddings"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"layer_norm_eps": 0.5}, "layer_norm_eps"),
        ("llama", {"is_causal": "no"}, "is_causal"),
        ("mistral", {"is_causal": False, "sliding_window": 9}, "is_causal"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=named):
        load(directory)


def test_memory_for_kv_is_refused_where_there_is_none(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "bert")
    with pytest.raises(ModelError, match="--kv-memory"):
        load(directory, kv_memory_bytes=1 << 20)


def test_the_longest_prompt_is_what_the_positions_have_room_for(tmp_path: Path) -> None:
    """RoBERTa's first positions are the padding's."""
    directory = write_checkpoint(tmp_path / "model", "roberta", max_position_embeddings=50, pad_token_id=1)
    plan = plan_load(EngineConfig(model=directory, device=DeviceKind.CPU))
    assert plan.wanted_len == 48
    driven = driven_over(load(directory), 100)
    (prompt,) = prompts_of([48])
    handle = driven.embed(prompt, Pooling.LAST)
    driven.run()
    expected = states_of(directory, prompt)[-1].tolist()
    assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=1e-5)
