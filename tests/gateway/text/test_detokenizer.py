"""Text that grows with its tokens is the text of all tokens at once."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizer_files import byte_level, sentencepiece

KINDS = {"byte level": Tokenizer(byte_level(), {}), "sentencepiece": Tokenizer(sentencepiece(), {})}

TEXTS = ["größer, naïve 日本語 🙂👩‍👩‍👧 end", "  two  spaces ", "the old world", "a\nb\n\n", "🙂"]


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(tokens) + 1) for cut in cuts}), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_pieces_join_to_the_whole(kind: str, text: str, cuts: list[int]):
    tokenizer = KINDS[kind]
    tokens = tokenizer.backend.encode(text, add_special_tokens=False).ids
    detokenizer = make_detokenizer(tokenizer, [])
    shown = [detokenizer.feed(piece) for piece in pieces(tokens, cuts)]
    assert "".join(shown) == tokenizer.backend.decode(tokens)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in shown)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, KINDS["byte level"].vocab_size - 1), max_size=40), cuts=st.lists(st.integers(0, 99))
)
def test_any_tokens_in_any_pieces_give_one_text(tokens: list[int], cuts: list[int]):
    """Noise too: what cannot be UTF-8 is marked, an incomplete end is dropped."""
    tokenizer = KINDS["byte level"]
    detokenizer = make_detokenizer(tokenizer, [])
    shown = "".join(detokenizer.feed(piece) for piece in pieces(tokens, cuts))
    whole = tokenizer.backend.decode(tokens)
    assert whole.startswith(shown)
    assert whole[len(shown) :].strip("\N{REPLACEMENT CHARACTER}") == ""
    assert len(whole) - len(shown) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_split_character_comes_whole_with_its_last_token(kind: str):
    tokenizer = KINDS[kind]
    tokens = tokenizer.backend.encode("🙂", add_special_tokens=False).ids
    detokenizer = make_detokenizer(tokenizer, [])
    shown = [detokenizer.feed([token]) for token in tokens]
    assert shown[-1] == "🙂"
    assert "".join(shown[:-1]).strip() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_incomplete_end_is_dropped(kind: str):
    tokenizer = KINDS[kind]
    tokens = tokenizer.backend.encode("ab🙂", add_special_tokens=False).ids
    detokenizer = make_detokenizer(tokenizer, [])
    assert detokenizer.feed(tokens[:-1]).strip() == "ab"


def test_first_word_after_a_prompt_keeps_its_space():
    tokenizer = KINDS["sentencepiece"]
    prompt = tokenizer.backend.encode("hello", add_special_tokens=True).ids
    world = tokenizer.backend.encode("world", add_special_tokens=False).ids  # begins with a space mark
    assert make_detokenizer(tokenizer, prompt).feed(world) == " world"


def test_prompt_that_ends_inside_a_character_is_not_repeated():
    tokenizer = KINDS["sentencepiece"]
    prompt = tokenizer.backend.encode("ab🙂", add_special_tokens=False).ids[:-1]
    text = make_detokenizer(tokenizer, prompt).feed(tokenizer.backend.encode("t", add_special_tokens=False).ids)
    assert "ab" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_no_text_unless_asked_for(kind: str):
    tokenizer = KINDS[kind]
    special = min(tokenizer.special_ids)
    name = tokenizer.backend.id_to_token(special)
    assert name is not None
    text = tokenizer.backend.encode("the", add_special_tokens=False).ids
    assert make_detokenizer(tokenizer, []).feed([special, *text, special]).strip() == "the"
    assert name in make_detokenizer(tokenizer, [], skip_special_tokens=False).feed([*text, special])


@pytest.mark.parametrize(("spaces", "expected"), [(True, "the <s> </s> <s> the"), (False, "the <s></s><s> the")])
def test_special_tokens_have_no_spaces_between_each_other_where_asked_for(spaces: bool, expected: str):
    """In a vocabulary whose decoder puts a space before each token."""
    backend = sentencepiece()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, {})
    word = backend.token_to_id("he")
    assert word is not None
    made = make_detokenizer(tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=spaces)
    text = made.feed([word, 1, 2, 1, word])
    assert text == expected.replace("the", "he")


@pytest.mark.parametrize("kind", KINDS)
def test_endless_noise_costs_the_same_for_every_token(kind: str):
    """A model that repeats half a character for ever; the text after it is there again."""
    tokenizer = KINDS[kind]
    noise = tokenizer.backend.encode("🙂", add_special_tokens=False).ids[-2]
    detokenizer = make_detokenizer(tokenizer, [])
    started = time.process_time()
    for _ in range(5000):
        detokenizer.feed([noise])
    assert time.process_time() - started < 2
    assert detokenizer.feed(tokenizer.backend.encode("the dog", add_special_tokens=False).ids).endswith("the dog")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_text(kind: str):
    """Also where one token is not a whole character; this is what logprobs report."""
    tokenizer = KINDS[kind]
    for text in TEXTS:
        tokens = tokenizer.backend.encode(text, add_special_tokens=False).ids
        prefix = "" if tokenizer.byte_level else " "  # SentencePiece puts a space before every text
        assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == prefix + text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


async def test_long_text_is_tokenized_like_a_short_one():
    tokenizer = KINDS["byte level"]
    text = "The quick brown fox. " * 4000
    tokens = tokenizer.encode(text, add_special_tokens=True)
    assert tokens.tolist() == tokenizer.backend.encode(text).ids
    assert tokenizer.exceeds(text, 10)
    assert not tokenizer.exceeds(text, len(tokens))
