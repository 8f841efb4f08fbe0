"""Parts of long texts: their first or last tokens are exactly those of the whole text."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from services.gateway.text.cuts import MOST_UNCUT, NoCuts
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizer_files import CHAT_TOKENS, TEXT, byte_level, sentencepiece

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CAMEL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
)
MORE_TEXT = [
    *TEXT,
    "e.g. Mr. Smith, it's I'll wE'D; a=b(c)[0]\n\n\tx += 1\r\n  y\n",
    "日本語のテキスト。字，字！？ 1234567 ",
]


def split_by(pattern: str) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def composed() -> tokenizers.Tokenizer:
    tokenizer = split_by(WORDS + r"\p{N}|" + SPACES)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def across_words() -> tokenizers.Tokenizer:
    """Its tokens go across words, and all marks are within some."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f"a{mark}b" * 50 for mark in " \n,.;:!?()，。、！？；："] + TEXT, trainer)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        MORE_TEXT,
        trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        MORE_TEXT, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "GPT-2": byte_level,
    "Llama 3": lambda: split_by(WORDS + r"\p{N}{1,3}|" + SPACES),
    "Qwen": composed,
    "o200k": lambda: split_by(CAMEL + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "Llama 2": sentencepiece,
    "T5": unigram,
    "BERT": wordpiece,
    "across words": across_words,
}
WITHOUT_CUTS = {"across words"}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, Tokenizer(KINDS[request.param](), {})


def random_text(random_: random.Random, num_chars: int) -> str:
    """Words, marks, spaces, numbers, special tokens and odd characters, with runs of some of them."""
    text = ""
    while len(text) < num_chars:
        unit = random_.choice(
            [
                random_.choice(MORE_TEXT),
                random_.choice(
                    ["the", "Word", "größe", "日本語", "ΑΒΓ", "e\u0301\u0301", "İ", "ﬁ", "ſ", "'s", "'LL", "İ'd"]
                ),
                random_.choice(
                    [" ", "  ", "\n", "\r\n", "\t", ".", ",", "。", "，", "!", "?)", "(", "\u3000", "\u0301"]
                ),
                random_.choice(["1", "12345", "_", "-", "🙂", "\u200d", "\x00", *CHAT_TOKENS, "<think>", "[CLS]"]),
            ]
        )
        text += unit * random_.choice([1, 1, 1, 1, 2, 3, 50 if len(unit) < 4 else 1])
    return text


@pytest.mark.few(5)
@pytest.mark.parametrize("from_left", [False, True])
def test_the_tokens_of_a_part_are_those_of_the_whole(kind: tuple[str, Tokenizer], from_left: bool) -> None:
    name, tokenizer = kind
    shortened = 0
    for seed in range(120):
        random_ = random.Random(seed)
        text = random_text(random_, random_.choice([300, 1500, 6000]))
        num_tokens, special = random_.choice([1, 2, 5, 40]), random_.random() < 0.5
        part = tokenizer.cuts.part(text, num_tokens, from_left=from_left)
        assert text.endswith(part) if from_left else text.startswith(part)
        shortened += len(part) < len(text)
        whole, of_part = (tokenizer.encode(each, add_special_tokens=special) for each in (text, part))
        kept = slice(-num_tokens, None) if from_left else slice(num_tokens)
        assert np.array_equal(of_part[kept], whole[kept]), (name, seed)
        assert len(part) == len(text) or len(of_part) > num_tokens
        if len(part) < len(text):
            cut = [
                tokenizer.encode_truncated(each, num_tokens, from_left=from_left, add_special_tokens=special)[0]
                for each in (text, part)
            ]
            assert np.array_equal(cut[0], cut[1]), (name, seed)
    assert (shortened > 40) is (name not in WITHOUT_CUTS), shortened


@pytest.mark.parametrize("from_left", [False, True])
def test_of_a_long_text_little_is_tokenized(kind: tuple[str, Tokenizer], from_left: bool) -> None:
    name, tokenizer = kind
    for text in ("word and more, " * 40_000, "日本語のテキスト。字，字！" * 50_000, "line\n" * 100_000):
        if name in WITHOUT_CUTS or ("。" in text and name in ("Llama 2", "T5", "BERT")):
            continue  # these know no mark of that text
        assert len(tokenizer.cuts.part(text, 5, from_left=from_left)) < 5000


def test_a_long_text_without_words_has_no_part(kind: tuple[str, Tokenizer]) -> None:
    _, tokenizer = kind
    for text in ("0123456789" * 60_000, "a" * 600_000, "word " + "0" * 600_000, "0" * 600_000 + " word word"):
        for from_left in (False, True):
            if text.startswith("word") is text.endswith("word") or text.startswith("word") is from_left:
                with pytest.raises(NoCuts):
                    tokenizer.cuts.part(text, 5, from_left=from_left)
    within = "0" * MOST_UNCUT
    assert tokenizer.cuts.part(within, 5, from_left=True) is within
