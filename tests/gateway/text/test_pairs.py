"""Pairs of texts as tokens: which tokens go where there are too many."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from services.gateway.text.tokenizer import Tokenizer, longest_first
from services.protocol.model_files.base import ModelError

MARKS = [("[CLS]", 0), ("[SEP]", 1)]


def words(pair: str) -> Tokenizer:
    """A tokenizer of a few words, with marks around a pair as the template says."""
    backend = Backend(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "c": 4}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=MARKS)
    return Tokenizer(backend, {})


@pytest.mark.parametrize(
    ("pair", "second_text"),
    [("[CLS] $A [SEP] $B:1 [SEP]:1", 4), ("[CLS] $A [SEP] $B [SEP]", 0), ("$A $B:1", 2)],
)
def test_the_second_text_begins_at_the_first_token_of_type_1(pair: str, second_text: int):
    tokenizer = words(pair)
    tokenizer.check_token_types()
    encoded = tokenizer.encode_pair(("a b", "b c a"), None, from_left=False)
    assert encoded.second_text == second_text
    assert len(encoded.token_ids) == 5 + pair.count("[")


@pytest.mark.parametrize("pair", ["[CLS]:2 $A $B:1", "$A $B:1 [SEP]:0", "$A:1 $B:0"])
def test_other_types_of_tokens_are_refused_at_the_start(pair: str):
    with pytest.raises(ModelError, match="types"):
        words(pair).check_token_types()


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ((3, 4), 7, (3, 4)),
        ((3, 4), 99, (3, 4)),
        ((3, 9), 7, (3, 4)),
        ((9, 3), 7, (4, 3)),
        ((9, 9), 7, (4, 3)),
        ((9, 9), 8, (4, 4)),
        ((2, 9), 1, (1, 0)),
        ((9, 2), 0, (0, 0)),
        ((4, 5), 7, (4, 3)),
        ((5, 4), 7, (4, 3)),
    ],
)
def test_tokens_go_of_the_longer_text(lengths: tuple[int, int], room: int, expected: tuple[int, int]):
    """As `longest_first` of `transformers` does."""
    assert longest_first(*lengths, room) == expected
    first, second = lengths
    while first + second > room:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    assert (first, second) == expected
