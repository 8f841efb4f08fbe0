"""Tokenizers of GGUF files: their ids are those of `transformers` over the same file."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from services.gateway.text.chat_template import load_chat_template
from services.gateway.text.tokenizer import load_tokenizer
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.gateway.tokenizer_files import CHAT_TOKENS, CHATML, TEXT, byte_level, sentencepiece
from tests.gguf_files import write_gguf

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "it's what THEY'LL say\r\n\n\n  indented\tand   spaced",
    "größer, naïve, 日本語, Ελλάδα, \U0001f600\u200d",
    "<|im_start|>user\nHello<|im_end|>\n<think>well</think>",
    "a<|eot|> b <|bos|>",
]
TELLING = [
    "in 1984 and 20,000 or 3.14159265",
    "it's what THEY'LL say, isn't it? I'VE",
    "f(word)[index] = (other)\n    return\n\n\nend",
    "a  b   c \t d\r\n e",
    "...wait!?\n(no)",
]
BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "qwen2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=640)


def entries(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """A tokenizer as a GGUF file's metadata."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    return {
        "ggml.tokens": tokens,
        "ggml.token_type": [int(kinds[special.get(token)]) for token in tokens],
        "ggml.bos_token_id": vocab.get("<|bos|>", 1),
        "ggml.eos_token_id": vocab.get("<|eos|>", 2),
        **more,
    }


def byte_level_entries(pre: str) -> dict[str, Any]:
    return _described(byte_level(), pre)


def telling_entries(pre: str) -> dict[str, Any]:
    """A vocabulary whose tokens cross all borders between words, so that the ids depend on where a text is cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=CHAT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in TELLING for _ in range(3)], trainer)
    return _described(tokenizer, pre)


def _described(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    merges = [" ".join(pair) for pair in _model(tokenizer)["merges"]]
    return entries(tokenizer, **{"ggml.model": "gpt2", "ggml.pre": pre, "ggml.merges": merges})


def sentencepiece_entries(**more: Any) -> dict[str, Any]:
    """Scores fall with the merges' order, as SentencePiece trains them."""
    tokenizer = sentencepiece()
    ranks = {left + right: rank for rank, (left, right) in enumerate(_model(tokenizer)["merges"])}
    found = entries(tokenizer, **{"ggml.model": "llama", "ggml.pre": "default", "ggml.unknown_token_id": 0, **more})
    found["ggml.scores"] = [-float(ranks.get(token, 1000)) for token in found["ggml.tokens"]]
    found["ggml.token_type"] = [
        int(TokenType.UNKNOWN if token == "<unk>" else TokenType.BYTE if token.startswith("<0x") else kind)
        for token, kind in zip(found["ggml.tokens"], found["ggml.token_type"], strict=True)
    ]
    return found


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


async def ids(path: Path, text: str, *, special: bool = True) -> list[int]:
    tokenizer = load_tokenizer(open_model(path))
    found: list[int] = (tokenizer.encode(text, add_special_tokens=special)).tolist()
    return found


def places(path: Path, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    found, offsets = load_tokenizer(open_model(path)).encode_with_offsets(text, add_special_tokens=special)
    return found.tolist(), [(start, end) for start, end in offsets.tolist()]


async def test_tokens_are_where_transformers_says_in_a_text(tmp_path: Path, checkpoint: Path) -> None:
    """Also of a vocabulary that puts a space before each text, and has bytes for characters that it lacks."""
    others = [*TEXT[:4], "the world", "a  b", "\U0001f600 snow ☃"]
    for described, special, texts in (
        (byte_level_entries("llama-bpe"), False, TEXTS),  # over such a file `transformers` adds no BOS
        (sentencepiece_entries(), True, others),
    ):
        path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=described)
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
        for text in texts:
            found = theirs(text, return_offsets_mapping=True, add_special_tokens=special)
            assert places(path, text, special=special) == (found["input_ids"], found["offset_mapping"]), text


@pytest.mark.few(1)
@pytest.mark.parametrize("pre", BYTE_LEVEL)
async def test_byte_level_texts_have_the_ids_of_transformers(pre: str, tmp_path: Path, checkpoint: Path) -> None:
    """But smollm's digits: see below."""
    for make, texts in ((byte_level_entries, [*TEXT[:4], *TEXTS]), (telling_entries, TELLING)):
        path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=make(pre))
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
        for text in texts:
            if pre == "smollm" and any(char.isdigit() for char in text):
                continue
            assert await ids(path, text, special=False) == theirs.encode(text, add_special_tokens=False), text
            tokenizer = load_tokenizer(open_model(path))
            assert tokenizer.backend.decode(await ids(path, text), skip_special_tokens=False).endswith(text)


async def test_each_kind_of_vocabulary_cuts_texts_its_own_way(tmp_path: Path, checkpoint: Path) -> None:
    """Else the test before could not tell one from another."""
    found = set()
    for pre in BYTE_LEVEL:
        path = write_gguf(tmp_path / f"{pre}.gguf", checkpoint, tokenizer=telling_entries(pre))
        found.add(tuple([tuple(await ids(path, text, special=False)) for text in TELLING]))
    assert len(found) == len(BYTE_LEVEL)


async def test_smollm_cuts_digits_one_by_one(tmp_path: Path, checkpoint: Path) -> None:
    """As SmolLM's own tokenizer.json does, and not as `transformers` reads the file: it knows nothing of this kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["1984 1984 1984 2000 2000 2000 2000"] * 9, trainer)
    found = {}
    for pre in ("gpt-2", "smollm"):
        path = write_gguf(tmp_path / f"{pre}.gguf", checkpoint, tokenizer=_described(tokenizer, pre))
        backend = load_tokenizer(open_model(path)).backend
        found[pre] = [backend.id_to_token(each) for each in await ids(path, "1984 2000")]
    assert found == {"gpt-2": ["1984", "Ġ2000"], "smollm": ["1", "9", "8", "4", "Ġ", "2", "0", "0", "0"]}


async def test_qwens_texts_are_composed_first(tmp_path: Path, checkpoint: Path) -> None:
    """As the model's own tokenizer does it; over a GGUF file `transformers` does not."""
    described = byte_level_entries("qwen2")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=described)
    vocab = {token: index for index, token in enumerate(described["ggml.tokens"])}
    own = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in described["ggml.merges"]])
    for text in ("gro\u0308ßer", "nai\u0308ve e\u0301", "größer"):
        assert await ids(path, text) == own.encode(text)
    assert await ids(path, "gro\u0308ßer") == await ids(path, "größer")


async def test_sentencepiece_texts_have_the_ids_of_transformers(tmp_path: Path, checkpoint: Path) -> None:
    """BOS first; spaces are marks, one more before the text; characters that no token has are bytes."""
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=sentencepiece_entries())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*TEXT[:4], "the world", "a  b", "\U0001f600 snow ☃"]:
        assert await ids(path, text) == theirs.encode(text), text
        assert (await ids(path, text))[0] == 1
    plain = write_gguf(
        tmp_path / "plain.gguf",
        checkpoint,
        tokenizer=sentencepiece_entries(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False}),
    )
    assert await ids(plain, " the") == (await ids(path, "the"))[1:]


async def test_bos_and_eos_stand_where_the_file_wants_them(tmp_path: Path, checkpoint: Path) -> None:
    for pre, flags, expected in (
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"ggml.add_bos_token": False}, (False, False)),
        ("qwen2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, (True, True)),
    ):
        path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=byte_level_entries(pre) | flags)
        found = await ids(path, "Hello")
        assert (found[0] == 0, found[-1] == 1) == expected
        assert await ids(path, "Hello", special=False) == found[expected[0] : len(found) - expected[1]]


def test_the_chat_template_and_the_tokens_that_it_names_come_with_the_file(tmp_path: Path, checkpoint: Path) -> None:
    described = byte_level_entries("qwen2") | {"chat_template": "{{ bos_token }}" + CHATML}
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=described)
    tokenizer = load_tokenizer(open_model(path))
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    template = load_chat_template(open_model(path), tokenizer.special_tokens)
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    messages = [{"role": "user", "content": "Hello"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == rendered
