"""What a model directory says in JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.config import Pooling
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.cross_encoder import CrossEncoder, PairForm
from services.protocol.model_files.info import SAMPLING_RANGES, GenerationDefaults, model_digest, read_model_info
from services.protocol.model_files.open import open_model
from services.protocol.model_files.sentence_modules import read_sentence_modules

CONFIG = {"vocab_size": 320, "max_position_embeddings": 512, "eos_token_id": 1}


def model_dir(path: Path, config: dict[str, Any], generation: object = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_without_a_generation_config_there_are_no_defaults(tmp_path: Path) -> None:
    info = read_model_info(open_model(model_dir(tmp_path, CONFIG)))
    assert (info.vocab_size, info.max_model_len) == (320, 512)
    assert info.generation == GenerationDefaults(eos_token_ids=(1,))


def test_sampling_defaults_are_taken_as_they_are(tmp_path: Path) -> None:
    values = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0, "eos_token_id": [9, 1]}
    found = read_model_info(open_model(model_dir(tmp_path, CONFIG, values | {"repetition_penalty": 1.05}))).generation
    assert found == GenerationDefaults((1, 9), temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.05)


def test_a_top_k_of_zero_is_off(tmp_path: Path) -> None:
    assert read_model_info(open_model(model_dir(tmp_path, CONFIG, {"top_k": 0}))).generation.top_k == -1


NOT_APPLIED = {
    "bad_words_ids": [[3]], "begin_suppress_tokens": [3], "constraints": [1], "dola_layers": "high",
    "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "exponential_decay_length_penalty": [5, 1.1], "force_words_ids": [[3]],
    "forced_bos_token_id": 3, "forced_eos_token_id": 3, "guidance_scale": 1.5, "max_length": 20, "max_new_tokens": 20,
    "max_time": 1.0, "min_length": 5, "min_new_tokens": 5, "no_repeat_ngram_size": 2, "num_beams": 4,
    "num_return_sequences": 2, "penalty_alpha": 0.6, "sequence_bias": {"1": 2}, "stop_strings": ["END"],
    "suppress_tokens": [3], "token_healing": True, "top_h": 0.4, "typical_p": 0.9, "watermarking_config": {"bias": 2.0},
}  # fmt: skip


def test_settings_that_are_not_applied_are_named(tmp_path: Path) -> None:
    """Those that nobody knows too; not those that are read, or that change nothing."""
    values = {"no_repeat_ngram_size": 0, "suppress_tokens": [3], "made_up": 1, "typical_p": 1.0, "bos_token_id": 4}
    found = read_model_info(open_model(model_dir(tmp_path, CONFIG, values))).generation
    assert found.not_applied == ("suppress_tokens", "made_up")


def test_each_setting_of_transformers_is_read_or_named_or_known_to_mean_nothing(tmp_path: Path) -> None:
    """A setting that a later version brings is none of these until somebody has looked at it."""
    from transformers import GenerationConfig

    others = GenerationConfig().to_dict().keys() - NOT_APPLIED.keys() - SAMPLING_RANGES.keys() - {"eos_token_id"}
    values = NOT_APPLIED | dict.fromkeys(others, "changed")
    found = read_model_info(open_model(model_dir(tmp_path, CONFIG, values))).generation
    assert set(found.not_applied) == NOT_APPLIED.keys()


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({"vocab_size": 320}, None, "max_position_embeddings"),
        (CONFIG | {"eos_token_id": "</s>"}, None, "eos_token_id"),
        (CONFIG, {"eos_token_id": [1, None]}, "generation_config.json: eos_token_id"),
        (CONFIG, {"temperature": "hot"}, "temperature"),
        (CONFIG, {"temperature": -1}, "temperature is -1"),
        (CONFIG, {"top_p": 0}, "top_p is 0"),
        (CONFIG, {"min_p": 1.5}, "min_p is 1.5"),
        (CONFIG, {"top_k": 2.5}, "top_k is 2.5"),
        (CONFIG, {"repetition_penalty": 0}, "repetition_penalty is 0"),
        (CONFIG, [1], "JSON object"),
    ],
)
def test_broken_values_are_refused_by_name(
    config: dict[str, Any], generation: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model_info(open_model(model_dir(tmp_path, config, generation)))
    assert named in str(caught.value)


def test_reading_it_imports_no_torch() -> None:
    """The gateway uses it."""
    check = "import sys, services.protocol.model_files.open; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def digest(path: Path) -> str:
    return model_digest(open_model(path))


def test_the_digest_tells_models_and_tokenizers_apart(tmp_path: Path) -> None:
    first, same, other = (
        model_dir(tmp_path / name, {"vocab_size": size}) for name, size in zip("abc", (1, 1, 2), strict=True)
    )
    assert digest(first) == digest(same) != digest(other)
    (same / "tokenizer.json").write_text("{}")
    assert digest(first) != digest(same)
    with pytest.raises(ModelError, match="does not exist"):
        digest(tmp_path / "nowhere")


def modules_in(directory: Path, kinds: list[str], **pooling: object) -> Path:
    """A model whose modules have these kinds."""
    model_dir(directory, CONFIG)
    modules = [
        {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"}
        for kind in kinds
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 4, **pooling}))
    return directory


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False, "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "cls"}, Pooling.CLS),
    ],
)
def test_the_way_of_pooling_is_that_of_the_files(tmp_path: Path, pooling: dict[str, Any], expected: Pooling) -> None:
    info = read_model_info(open_model(modules_in(tmp_path, ["Transformer", "Pooling", "Normalize"], **pooling)))
    assert (info.pooling, info.normalizes) == (expected, True)


def test_without_a_module_that_normalizes_vectors_keep_their_length(tmp_path: Path) -> None:
    directory = modules_in(tmp_path, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    assert not read_model_info(open_model(directory)).normalizes
    (directory / "modules.json").unlink()
    info = read_model_info(open_model(directory))
    assert (info.pooling, info.normalizes) == (Pooling.LAST, True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "named"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "the module Dense"),
        (["Transformer"], {}, "no module for pooling"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}, "pooling_mode weightedmean"),
        (["Transformer", "Pooling"], {}, "by none"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
    ],
)
def test_modules_that_are_not_there_are_refused_by_name(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read_model_info(open_model(modules_in(tmp_path, kinds, **pooling)))


def with_file(directory: Path, name: str, **values: object) -> Path:
    """A model with one more file of sentence-transformers."""
    modules_in(directory, ["Transformer", "Pooling"], pooling_mode_cls_token=True)
    (directory / name).write_text(json.dumps(values))
    return directory


def test_prompts_are_those_of_the_files(tmp_path: Path) -> None:
    prompts = {"query": "Q: ", "Clustering": "C: "}
    about = {"__version__": {"pytorch": "2"}, "similarity_fn_name": "dot", "default_prompt_name": "query"}
    directory = with_file(tmp_path, "config_sentence_transformers.json", prompts=prompts, **about)
    texts = read_model_info(open_model(directory)).texts
    assert (texts.default_prompt, texts.lower_cases) == ("Q: ", False)
    assert [texts.first_prompt(names) for names in (("document", "query"), ("clustering",), ("document",))] == [
        "Q: ",
        "C: ",
        None,
    ]


def test_the_longest_text_and_lower_case_are_those_of_the_files(tmp_path: Path) -> None:
    about = {"max_seq_length": 40, "do_lower_case": True, "transformer_task": "feature-extraction"}
    directory = with_file(tmp_path, "sentence_bert_config.json", **about)
    modules = read_sentence_modules(directory)
    assert modules is not None
    assert modules.max_tokens == 40
    assert modules.texts.prepared("Groß", "A: ") == "a: groß"


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case"),
        ("sentence_roberta_config.json", {"query_expansion": True}, "query_expansion"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config_sentence_transformers.json", {"truncate_dim": 3}, "truncate_dim"),
        ("modules.json", None, "custom_st.Transformer"),
        ("1_Pooling/config.json", {"pooling_mode": "cls", "odd": 1}, "odd"),
    ],
)
def test_what_nobody_reads_of_these_files_is_refused_by_name(
    tmp_path: Path, name: str, values: dict[str, Any] | None, named: str
) -> None:
    directory = with_file(tmp_path, name, **(values or {}))
    if values is None:
        (directory / name).write_text(json.dumps([{"type": "custom_st.Transformer"}]))
    with pytest.raises(ModelError, match=named):
        read_model_info(open_model(directory))


def test_prompts_that_are_not_pooled_are_refused(tmp_path: Path) -> None:
    directory = with_file(tmp_path, "config_sentence_transformers.json", prompts={"query": ""})
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls", "include_prompt": False}))
    assert read_model_info(open_model(directory)).pooling is Pooling.CLS
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Q: "}}))
    with pytest.raises(ModelError, match="include_prompt"):
        read_model_info(open_model(directory))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["BertModel"]}, False),
        ({"architectures": ["LlamaForCausalLM"], "is_causal": False}, False),
        ({}, True),
    ],
)
def test_encoders_and_models_that_see_both_ways_generate_nothing(
    tmp_path: Path, changes: dict[str, Any], expected: bool
) -> None:
    assert read_model_info(open_model(model_dir(tmp_path, CONFIG | changes))).generates is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["RobertaForSequenceClassification"]}, CrossEncoder(Pooling.CLS, sigmoid=True)),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert"}
            | {
                "classifier_pooling": "mean",
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            CrossEncoder(Pooling.MEAN, sigmoid=False),
        ),
        (
            {"architectures": ["XLMRobertaForSequenceClassification"], "classifier_pooling": "mean"}
            | {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.1.0"}},
            CrossEncoder(Pooling.CLS, sigmoid=True),
        ),
        ({"architectures": ["BertModel"]}, None),
    ],
)
def test_a_cross_encoder_says_how_its_number_becomes_a_score(
    tmp_path: Path, changes: dict[str, Any], expected: CrossEncoder | None
) -> None:
    info = read_model_info(open_model(model_dir(tmp_path, CONFIG | changes)))
    assert info.cross_encoder == expected
    if expected is not None:
        assert (info.pooling, info.generates) == (expected.pooling, False)


@pytest.mark.parametrize("padding_id", [None, 5])
def test_a_decoder_scores_a_pair_by_its_last_token_that_is_no_padding(tmp_path: Path, padding_id: int | None) -> None:
    config = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    info = read_model_info(open_model(model_dir(tmp_path, config | {"pad_token_id": padding_id})))
    assert info.cross_encoder == CrossEncoder(Pooling.LAST, True, padding_id=padding_id)
    for tokens, kept in (([5, 1, 2], 3), ([1, 5, 2, 5, 5], 3), ([5, 5], 1), ([4], 1)):
        left = info.cross_encoder.without_padding(np.array(tokens, np.int32))
        assert left.tolist() == (tokens if padding_id is None else tokens[:kept])


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, PairForm.SEGMENTS),
        ({"use_sep_token": False}, PairForm.JOINED),
        ({"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}, PairForm.JUDGED),
    ],
)
def test_config_json_says_how_a_pair_is_read(tmp_path: Path, changes: dict[str, Any], form: PairForm) -> None:
    config = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    info = read_model_info(open_model(model_dir(tmp_path, config | changes)))
    assert info.cross_encoder is not None
    assert info.cross_encoder.form is form


@pytest.mark.parametrize(
    ("changes", "inputs", "has_types"),
    [
        ({}, None, True),
        ({"type_vocab_size": 2}, ["input_ids", "token_type_ids", "attention_mask"], True),
        ({}, ["input_ids", "attention_mask"], False),
        ({"type_vocab_size": 1}, None, False),
        ({"model_type": "roberta"}, None, False),
    ],
)
def test_a_bert_tells_the_texts_of_a_pair_apart_if_its_tokenizer_does(
    tmp_path: Path, changes: dict[str, Any], inputs: list[str] | None, has_types: bool
) -> None:
    config = CONFIG | {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    directory = model_dir(tmp_path, config | changes)
    if inputs is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"model_input_names": inputs}))
    assert read_model_info(open_model(directory)).cross_encoder == CrossEncoder(Pooling.CLS, True, has_types)


def test_another_function_of_a_cross_encoder_s_number_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["RobertaForSequenceClassification"]}
    odd = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(ModelError, match="Tanh"):
        read_model_info(open_model(model_dir(tmp_path, config | odd)))
