"""Cross encoders: the number that `transformers` gives a pair, of many pairs in a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from services.config import Pooling
from services.protocol.model_files.base import ModelError
from services.protocol.outcomes import FailureCode
from tests.checkpoints import edit_json, write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.test_embeddings import driven_over
from tests.engine.test_encoders import load

SHAPES: dict[str, tuple[str, dict[str, Any], Pooling]] = {
    "bert": ("bert-classifier", {"type_vocab_size": 2}, Pooling.CLS),
    "bert-three-types": ("bert-classifier", {"type_vocab_size": 3, "hidden_act": "gelu_new"}, Pooling.CLS),
    "roberta": ("roberta-classifier", {"num_attention_heads": 2, "hidden_act": "relu"}, Pooling.CLS),
    "roberta-one-type": ("roberta-classifier", {"type_vocab_size": 1, "pad_token_id": 5}, Pooling.CLS),
    "xlm-roberta": ("xlm-roberta-classifier", {"type_vocab_size": 1, "num_hidden_layers": 3}, Pooling.CLS),
    "modernbert-cls": ("modernbert-classifier", {"local_attention": 16, "num_hidden_layers": 4}, Pooling.CLS),
    "modernbert-mean-biases": (
        "modernbert-classifier",
        {
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "classifier_activation": "silu",
            "norm_bias": True,
            "local_attention": 8,
        },
        Pooling.MEAN,
    ),
}
DEFAULT = ("bert", "xlm-roberta", "modernbert-mean-biases")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_the_number_of_a_pair_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    family, shape, pooling = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    runner, prompts = load(directory), prompts_of([3, 8, 37, 90, 37, 21])
    assert runner.embedding_size == 1
    driven = driven_over(runner, 70)
    seconds = [0, 3, 1, 89, 0, 10] if family == "bert-classifier" else [0] * 6
    handles = [
        driven.embed(prompt, pooling, second_text=second) for prompt, second in zip(prompts, seconds, strict=True)
    ]
    driven.run()
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    for prompt, second, handle in zip(prompts, seconds, handles, strict=True):
        types = [int(0 < second <= index) for index in range(len(prompt))]
        typed = {"token_type_ids": torch.tensor([types])} if second else {}
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), **typed).logits[0].tolist()
        assert driven.embeddings[handle].tolist() == pytest.approx(expected, abs=1e-5)
    driven.assert_baseline()


@pytest.mark.parametrize("shape", [{}, {"type_vocab_size": 1}])
def test_a_model_without_types_of_tokens_refuses_a_second_text(shape: dict[str, Any], tmp_path: Path) -> None:
    family = "bert-classifier" if shape else "modernbert-classifier"
    runner = load(write_checkpoint(tmp_path / "model", family, **shape))
    assert not runner.token_types
    driven = driven_over(runner, 70)
    handle = driven.embed([3, 4, 5], Pooling.CLS, second_text=1)
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(handle, FailureCode.UNSUPPORTED)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "id2label"),
        ({"num_labels": 3}, "id2label"),
        ({"classifier_activation": "mish"}, "classifier_activation"),
    ],
)
def test_what_gives_no_score_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "modernbert-classifier")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=named):
        load(directory)
