"""Whatever encodes a text, its tokens are those that `tokenizers` gives."""

import fastokens
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from services.gateway.text import tokenizer as text_tokenizer
from services.gateway.text.fast_encoder import FastEncoder, make_fast_encoder
from tests.gateway.tokenizer_files import CHAT_TOKENS, TEXT, byte_level, sentencepiece

# The patterns that split texts into words, of Llama 3 and of DeepSeek V3.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG_S, VOWEL_SEPARATOR = "'\u017f\u0906", "  \u180e"  # what the two libraries split differently


def split_by(pattern: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=CHAT_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, *[LONG_S[1:], VOWEL_SEPARATOR, "  "] * 9], trainer)
    return tokenizer


KINDS = {
    "byte level": byte_level(),
    "llama 3": split_by(LLAMA3),
    "qwen": split_by(LLAMA3, normalizers.NFC()),
    "deepseek": split_by(DEEPSEEK),
    "sentencepiece": sentencepiece(),
}
FAST = {kind: make_fast_encoder(backend) for kind, backend in KINDS.items()}

PIECES = [*CHAT_TOKENS, "<think>", "<s>", "'S", "'ll", "  ", "\n", "\r\n\n", "\t", "12345", "e\u0301", "🙂", "ﬁ"]
texts = st.lists(st.one_of(st.sampled_from([*PIECES, *TEXT]), st.text(max_size=8)), max_size=12).map("".join)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=texts, special=st.booleans())
@example(text=LONG_S, special=False)
@example(text=VOWEL_SEPARATOR, special=False)
def test_same_tokens(kind: str, text: str, special: bool):
    fast = FAST[kind]
    assert fast is not None
    want = KINDS[kind].encode(text, add_special_tokens=special).ids
    assert fast.encode(text, add_special_tokens=special).tolist() == want


async def test_unknown_kind_is_encoded_by_the_library_that_knows_it():
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    assert make_fast_encoder(backend) is None
    tokens = text_tokenizer.Tokenizer(backend, {}).encode("ab b", add_special_tokens=False)
    assert tokens.tolist() == backend.encode("ab b").ids


def test_other_tokens_are_noticed():
    fast = fastokens.Tokenizer.from_json_str(KINDS["llama 3"].to_str())
    assert not FastEncoder(fast, KINDS["deepseek"]).agrees()


def test_text_that_it_gives_up_on():
    backend = KINDS["deepseek"]
    impatient = fastokens.Tokenizer.from_json_str(backend.to_str(), pcre2_match_limit=1)
    with pytest.raises(ValueError, match="match limit"):
        impatient.encode(TEXT[0])
    tokens = FastEncoder(impatient, backend).encode(TEXT[0], add_special_tokens=False)
    assert tokens.tolist() == backend.encode(TEXT[0]).ids
