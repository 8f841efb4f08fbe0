"""A checkpoint as a GGUF file and back: the same numbers, the same shape, the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers

from loadtest.compare.gguf_checkpoint import CheckpointError, gguf_name, read_shape, write_gguf
from loadtest.compare.llama_cpp import Weights, weights_of
from loadtest.compare.model_files import vocabulary_of
from loadtest.compare.smollm2 import write_directory
from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import open_tensors
from services.protocol.model_files.gguf_file import GgufFile
from services.protocol.model_files.open import open_model
from tests.checkpoints import edit_json, save_tensors, write_checkpoint
from tests.gateway.tokenizer_files import byte_level

TEXT = "The quick brown fox, 1984: größer\n    日本語"
VOCABULARY = 700  # more rows than the tokenizer has tokens


def checkpoint(folder: Path, tokenizer: Tokenizer | None = None, *, tied: bool = False) -> Path:
    write_checkpoint(folder, dtype=torch.bfloat16, vocab_size=VOCABULARY, tie_word_embeddings=tied)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    return folder


def weights(path: Path) -> dict[str, torch.Tensor]:
    with open_tensors(path, parse_model_config(open_model(path).config()), torch.device("cpu")) as stored:
        return {name: stored.read(name, torch.bfloat16) for name in stored.names}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_holds_the_checkpoints_numbers(tmp_path: Path, tied: bool) -> None:
    source, target = checkpoint(tmp_path / "model", tied=tied), tmp_path / "model.gguf"
    write_gguf(source, target)
    assert same(weights(target), load_file(source / "model.safetensors"))
    ours, theirs = (parse_model_config(open_model(path).config()) for path in (source, target))
    assert (ours.hidden_size, ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.rope) == (
        theirs.hidden_size,
        theirs.num_layers,
        theirs.num_heads,
        theirs.num_kv_heads,
        theirs.head_dim,
        theirs.rope,
    )
    assert (ours.tie_word_embeddings, ours.vocab_size) == (theirs.tie_word_embeddings, theirs.vocab_size)


def test_matrices_are_stored_in_bfloat16_and_norms_in_float32(tmp_path: Path) -> None:
    write_gguf(checkpoint(tmp_path / "model"), tmp_path / "model.gguf")
    kinds = {name: tensor.ggml_type for name, tensor in GgufFile(tmp_path / "model.gguf").header.tensors.items()}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {0}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {30}


def smollm_words() -> Tokenizer:
    tokenizer = byte_level()
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("made", [byte_level, smollm_words])
def test_texts_become_the_same_tokens(tmp_path: Path, made) -> None:
    source = checkpoint(tmp_path / "model", made())
    write_gguf(source, tmp_path / "model.gguf")
    ours, theirs = made(), Tokenizer.from_str(open_model(tmp_path / "model.gguf").tokenizer().decode())
    text = f"<|im_start|>{TEXT}<think>"
    assert theirs.encode(text).ids == ours.encode(text).ids
    assert theirs.decode(theirs.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architectures", ["Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "rope scaling 'yarn'"),
    ],
)
def test_what_is_no_plain_llama_is_refused_by_name(tmp_path: Path, key: str, value: Any, words: str) -> None:
    source = checkpoint(tmp_path / "model")
    edit_json(source / "config.json", **{key: value})
    with pytest.raises(CheckpointError, match=words):
        read_shape(source)


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    edit_json(source / "config.json", drop=("num_hidden_layers",))
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        read_shape(source)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(CheckpointError, match="Whitespace"):
        write_gguf(checkpoint(tmp_path / "model", tokenizer), tmp_path / "model.gguf")


def test_numbers_that_are_no_bfloat16_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    held = load_file(source / "model.safetensors")
    save_tensors(source / "model.safetensors", {name: tensor.float() for name, tensor in held.items()})
    with pytest.raises(CheckpointError, match="is stored as F32"):
        write_gguf(source, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate.weight", "norm"])
def test_an_unknown_weight_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        gguf_name(name)


def test_a_gguf_file_becomes_a_directory_with_the_same_model(tmp_path: Path) -> None:
    write_gguf(checkpoint(tmp_path / "model"), tmp_path / "model.gguf")
    write_directory(tmp_path / "model.gguf", tmp_path / "again")
    assert same(
        load_file(tmp_path / "again" / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    )
    ours, theirs = (open_model(tmp_path / name) for name in ("model.gguf", "again"))
    assert parse_model_config(ours.config()) == parse_model_config(theirs.config())
    assert (ours.tokenizer(), ours.special_tokens()) == (theirs.tokenizer(), theirs.special_tokens())


def test_without_llama_quantize_there_are_no_weights_in_4_bits(tmp_path: Path) -> None:
    found = weights_of(tmp_path / "llama-server", checkpoint(tmp_path / "model"), tmp_path)
    assert found.bf16 is not None
    assert found.own is found.q4_1 is None
    assert same(weights(found.bf16), load_file(tmp_path / "model" / "model.safetensors"))


def test_a_gguf_file_is_llama_cpps_own_and_as_large_as_its_checkpoint(tmp_path: Path) -> None:
    source, file = checkpoint(tmp_path / "model"), tmp_path / "model.gguf"
    write_gguf(source, file)
    assert weights_of(tmp_path / "llama-server", file, tmp_path) == Weights(own=file)
    assert vocabulary_of(file) == vocabulary_of(source) == VOCABULARY
