"""Decoders with a head for a score: the number that `transformers` gives a prompt, over chunks, caches and batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from services.config import DeviceKind, Pooling
from services.config.engine import EngineConfig
from services.engine.runner.base import Runner
from services.engine.runner.load import load_runner
from services.engine.self_check import SelfCheck, SelfCheckError
from services.protocol.model_files.base import ModelError
from services.protocol.outcomes import FailureCode
from tests.checkpoints import edit_json, plant, write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.test_embeddings import driven_over

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-scorer", {"attention_bias": True, "num_hidden_layers": 3}),
    "llama-both-ways": ("llama-scorer", {"is_causal": False}),
    "qwen2-window": ("qwen2-scorer", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3-scorer", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3-tied": ("qwen3-scorer", {"tie_word_embeddings": True, "pad_token_id": 7}),
}
DEFAULT = ("llama", "qwen3-tied")


def load(directory: Path) -> Runner:
    return load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, num_threads=1, block_size=8)).runner


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_the_number_of_a_prompt_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """In float64, from which its float32 is as far as ours. Of prompts of one token and of many chunks, several in a
    step; twice, the second time with what is cached.
    """
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    runner, prompts = load(directory), prompts_of([1, 8, 37, 90])
    assert (runner.embedding_size, runner.generates) == (1, False)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    model.eval()
    driven = driven_over(runner, 13)
    for again in (False, True):
        handles = [driven.embed(prompt, Pooling.LAST) for prompt in prompts]
        driven.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0, 0]
            found = torch.tensor(driven.embeddings[handle][0], dtype=torch.float64)
            assert found.item() == pytest.approx(expected.item(), abs=2e-5)
            assert found.sigmoid().item() == pytest.approx(expected.sigmoid().item(), abs=1e-5)
        if again and not runner.whole_prompts:
            assert [driven.cached[handle] for handle in handles] == [0, 0, 32, 88]
        driven.assert_baseline()  # no block is held after a score


def test_a_scorer_generates_nothing(tmp_path: Path) -> None:
    driven = driven_over(load(write_checkpoint(tmp_path / "model", "llama-scorer")), 40)
    driven.submit([3, 4, 5], 1)
    driven.run()
    assert [failure.code for failure in driven.failures] == [FailureCode.UNSUPPORTED]


def test_damaged_weights_of_the_head_are_found_at_the_start(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen2-scorer")
    check = SelfCheck(load(directory), 256)
    check.learn()
    check.repeat()
    plant(directory, "score.weight", 0, float("nan"))
    with pytest.raises(SelfCheckError, match="not finite"):
        SelfCheck(load(directory), 256).learn()


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"id2label": {"0": "no", "1": "yes"}}, "id2label"), ({"architectures": ["Qwen3ForCausalLM"]}, "lm_head")],
)
def test_what_gives_no_score_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen3-scorer")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=named):
        load(directory)
