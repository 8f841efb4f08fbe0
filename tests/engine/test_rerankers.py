"""Qwen3-Reranker: a language model's logits of two tokens as a score, as `transformers` has them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.config import Pooling
from services.protocol.model_files.base import ModelError
from tests.checkpoints import edit_json, write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.test_embeddings import driven_over
from tests.engine.test_scorers import load
from tests.model_cards import QWEN3_RERANKER

NO, YES = 11, 270


def reranker(directory: Path, *, tokens: dict[str, int] | None = None, **shape: Any) -> Path:
    """Writes a checkpoint of a language model, which config.json says is a reranker."""
    write_checkpoint(directory, "qwen3", **shape)
    vocab = {"no": NO} if tokens is None else tokens
    added = [{"id": YES, "content": "yes"}] if tokens is None else []
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    edit_json(directory / "config.json", **QWEN3_RERANKER)
    return directory


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_score_is_how_much_likelier_yes_is_than_no(tied: bool, tmp_path: Path) -> None:
    """In chunks, several pairs in a step, and again from the cache; no block is held afterwards."""
    directory = reranker(tmp_path / "model", tie_word_embeddings=tied)
    runner, prompts = load(directory), prompts_of([1, 37, 90])
    assert (runner.embedding_size, runner.generates) == (1, False)
    edit_json(directory / "config.json", drop=tuple(QWEN3_RERANKER), architectures=["Qwen3ForCausalLM"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    driven = driven_over(runner, 13)
    for _ in range(2):
        handles = [driven.embed(prompt, Pooling.LAST) for prompt in prompts]
        driven.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0, -1, [NO, YES]]
            number = torch.tensor(driven.embeddings[handle][0], dtype=torch.float64)
            assert number.sigmoid().item() == pytest.approx(logits.softmax(0)[1].item(), abs=1e-5)
            assert number.item() == pytest.approx((logits[1] - logits[0]).item(), abs=2e-5)
        driven.assert_baseline()  # no block is held after a score


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"classifier_from_token": ["no"]}, "classifier_from_token"),
        ({"classifier_from_token": None}, "classifier_from_token"),
        ({"is_original_qwen3_reranker": False}, "classifier_from_token"),
        ({"is_original_qwen3_reranker": "yes"}, "is_original_qwen3_reranker"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "classifier_from_token"),
        ({"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2"}, "is_original_qwen3_reranker"),
        ({"method": "from_2_way_softmax"}, "method"),
        ({"classifier_from_token": ["no", "maybe"]}, "maybe"),
    ],
)
def test_what_gives_no_score_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory = reranker(tmp_path / "model")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=named):
        load(directory)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocab_size"):
        load(reranker(tmp_path / "model", tokens={"no": 1, "yes": 320}))
