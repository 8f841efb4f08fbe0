"""What a GGUF file says of its model, and what is refused in words."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType

from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import ROTARY_FACTORS, GgufFile
from services.protocol.model_files.gguf_header import read_gguf_header
from services.protocol.model_files.info import model_digest, read_model_info
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.gguf_files import plain_tokens, write_gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def changed(tmp_path: Path, checkpoint: Path, **change: Any) -> Path:
    return write_gguf(tmp_path / "model.gguf", checkpoint, change={k.replace("__", "."): v for k, v in change.items()})


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path, checkpoint: Path) -> None:
    path = changed(tmp_path, checkpoint, other__bool=True, other__numbers=[1, 2, 3], other__text="größer")
    header, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert header.metadata == {key: field.contents() for key, field in theirs.fields.items() if key not in own}
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.ggml_type, ours.offset) == (tensor.tensor_type, tensor.data_offset)
    assert header.data_start == theirs.data_offset


def test_limits_ends_and_recommended_sampling(tmp_path: Path, checkpoint: Path) -> None:
    sampling = {"general__sampling__temp": 0.5, "general__sampling__top_k": 20, "general__sampling__mirostat": 2}
    path = changed(tmp_path, checkpoint, tokenizer__ggml__eot_token_id=7, **sampling)
    info = read_model_info(open_model(path))
    assert (info.vocab_size, info.max_model_len) == (320, 512)
    assert info.generation.eos_token_ids == (1, 7)
    assert info.generation.not_applied == ("mirostat",)
    assert (info.generation.temperature, info.generation.top_k) == (0.5, 20)
    overridden = read_model_info(open_model(path), {"temperature": 0, "min_p": 0.1}).generation
    assert (overridden.temperature, overridden.top_k, overridden.min_p) == (0.0, 20, 0.1)


def test_an_answer_ends_at_every_token_that_is_known_to_end_one(tmp_path: Path, checkpoint: Path) -> None:
    """Converters write the id of one: Llama 3's files may name the end of the text alone, and turns end otherwise."""
    described = plain_tokens(320)
    for id, token in ((300, "<|eot_id|>"), (301, "<|endoftext|>"), (302, "<|im_end|>")):
        described["ggml.tokens"][id] = token
        described["ggml.token_type"][id] = TokenType.CONTROL if id < 302 else TokenType.NORMAL
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=described)
    assert read_model_info(open_model(path)).generation.eos_token_ids == (1, 300, 301)
    listed = write_gguf(tmp_path / "listed.gguf", checkpoint, change={"tokenizer.ggml.eos_token_ids": [5, 1, 9999]})
    assert read_model_info(open_model(listed)).generation.eos_token_ids == (1, 5)


def test_entries_that_change_nothing_are_taken(tmp_path: Path, checkpoint: Path) -> None:
    """As converters write them."""
    change = {
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 320,
        "llama.expert_count": 0,
        "llama.attention.layer_norm_epsilon": 1e-5,
        "llama.tensor_data_layout": "Meta AI original pth",
        "tokenizer.ggml.padding_token_id": 4294967295,
        "tokenizer.ggml.seperator_token_id": 4294967295,
        "quantize.imatrix.file": "imatrix.dat",
    }
    files = open_model(write_gguf(tmp_path / "model.gguf", checkpoint, change=change))
    plain = open_model(write_gguf(tmp_path / "plain.gguf", checkpoint))
    assert files.config() == plain.config()
    assert files.special_tokens() == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_the_digest_tells_files_apart(tmp_path: Path, checkpoint: Path) -> None:
    paths = [write_gguf(tmp_path / f"{name}.gguf", checkpoint, change=change) for name, change in (
        ("a", {}), ("b", {}), ("c", {"tokenizer.chat_template": "other"})
    )]  # fmt: skip
    first, same, other = (model_digest(open_model(path)) for path in paths)
    assert first == same != other


def test_neither_torch_nor_the_gguf_package_is_needed(tmp_path: Path, checkpoint: Path) -> None:
    """The gateway reads the file."""
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    check = (
        "import sys; from pathlib import Path; from services.protocol.model_files.open import open_model;"
        f"files = open_model(Path({str(path)!r})); files.config(); files.tokenizer(); files.chat_template();"
        "sys.exit(bool({'torch', 'gguf', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported in GGUF files"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
    "unknown entry": ({"llama.attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping 30.0 is not supported"),
    "window": ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64 is not supported"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 is not supported beside"),
    "missing": ({"llama.block_count": None}, "block_count is missing, a positive integer was expected"),
    "mistyped": ({"llama.block_count": "two"}, "block_count is 'two', a positive integer was expected"),
    "parts": ({"split.count": 3, "general.architecture": None}, "is one of 3 parts: join them first"),
    "mistyped parts": ({"split.count": "x"}, "is one of x parts"),
    "a list": ({"general.name": None, "llama.rope.scaling.type": ["yarn"]}, "is not supported"),
    "another kind of file": ({"general.type": "adapter"}, "general.type 'adapter' is not supported"),
    "too many blocks": ({"llama.block_count": 2**31}, "2147483648 blocks cannot be of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path, checkpoint: Path) -> None:
    change, words = REFUSED[name]
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change=change)
    with pytest.raises(ModelError, match=words) as caught:
        open_model(path).config()
    assert str(caught.value).startswith("model.gguf")


def test_tokenizers_of_another_kind_are_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    for name, change in (("t5", {"ggml.model": "t5"}), ("tekken", {"ggml.pre": "tekken"})):
        path = write_gguf(tmp_path / f"{name}.gguf", checkpoint, tokenizer=plain_tokens(320) | change)
        with pytest.raises(ModelError, match=f"'{name}' is not supported"):
            open_model(path).tokenizer()


def test_a_vocabulary_is_believed_only_as_far_as_it_goes(tmp_path: Path, checkpoint: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change={"tokenizer.ggml.bos_token_id": 320})
    with pytest.raises(ModelError, match="bos_token is token 320, of 320"):
        open_model(path).special_tokens()


def test_a_file_that_ends_early_or_counts_wrongly_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """Wherever it ends within its header, and whatever number says how much follows: at once, and in words."""
    content = write_gguf(tmp_path / "whole.gguf", checkpoint).read_bytes()
    start = read_gguf_header(tmp_path / "whole.gguf").data_start
    path = tmp_path / "model.gguf"
    for end in (0, 3, 4, 9, 23, 24, 30, 100, start // 2, start - 64):
        path.write_bytes(content[:end])
        with pytest.raises(ModelError, match=r"model\.gguf is damaged or no GGUF file"):
            read_gguf_header(path)
    for at in (8, 16, 24):  # tensors, entries, the first key's length
        for number in (b"\xff" * 7 + b"\x7f", b"\xff" * 8, len(content).to_bytes(8, "little")):
            path.write_bytes(content[:at] + number + content[at + 8 :])
            with pytest.raises(ModelError, match=r"model\.gguf is damaged or no GGUF file"):
                read_gguf_header(path)


def test_lists_that_no_model_has_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "model.gguf", 200_000_000
    key = b"\x01" + bytes(7) + b"k"
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + key
    path.write_bytes(head + (9).to_bytes(4, "little") + bytes(4) + count.to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(count + 1000)
    with pytest.raises(ModelError, match="a list of 200000000 items"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.pre", ["gpt-2"], "tokenizer.ggml.pre is not a text"),
        ("tokenizer.ggml.pre", None, "has no tokenizer.ggml.pre, so it is from before 2024"),
        ("tokenizer.ggml.add_bos_token", "false", "add_bos_token is not true or false"),
        ("tokenizer.ggml.token_type", [1, 1], "320 tokens have 2 kinds"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is missing or no list of str"),
        ("tokenizer.ggml.remove_extra_whitespaces", True, "tokenizer.ggml.remove_extra_whitespaces True is not"),
        ("tokenizer.ggml.precompiled_charsmap", [1, 2], r"tokenizer.ggml.precompiled_charsmap \[1, 2\] is not"),
        ("tokenizer.ggml.normalizer.lowercase", True, "tokenizer.ggml.normalizer.lowercase True is not supported"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_or_has_unknown_entries_is_refused(
    key: str, value: object, words: str, tmp_path: Path, checkpoint: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change={key: value})
    with pytest.raises(ModelError, match=words):
        open_model(path).tokenizer()


def test_a_template_for_tools(tmp_path: Path, checkpoint: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change={"tokenizer.chat_template.tool_use": "tools"})
    assert open_model(path).tool_template() == "tools"


def test_a_template_that_is_no_text_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change={"tokenizer.chat_template": 7})
    with pytest.raises(ModelError, match="chat_template is not a text"):
        open_model(path).chat_template()


@pytest.mark.parametrize("shape", [(2**62,), (2**40,), (4, 4)])
def test_rotary_factors_that_are_no_vector_are_refused(
    shape: tuple[int, ...], tmp_path: Path, checkpoint: Path
) -> None:
    """Whatever size the file claims."""
    files = GgufFile(write_gguf(tmp_path / "model.gguf", checkpoint, rotary_factors=[1.0] * 8))
    tensor = files.header.tensors[ROTARY_FACTORS]
    files.header.tensors[ROTARY_FACTORS] = replace(tensor, shape=shape)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is no vector in float32"):
        files.config()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, words in (
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (b"GGUF\x01" + bytes(40), "version 1"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            GgufFile(path).config()
    with pytest.raises(ModelError, match="does not exist"):
        open_model(tmp_path / "nowhere.gguf")
