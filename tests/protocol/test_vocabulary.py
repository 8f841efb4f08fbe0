"""Ids of single tokens, as the library `tokenizers` has them."""

import pytest
from tokenizers import Tokenizer, models

from services.protocol.model_files.base import ModelError
from services.protocol.model_files.vocabulary import token_ids


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"no": 0, "yes": 1}, unk_token="no"),
        models.BPE(vocab={"n": 0, "o": 1, "yes": 2, "no": 3}, merges=[("n", "o")]),
        models.Unigram([("yes", -1.0), ("no", -2.0)]),
    ],
)
def test_ids_are_those_of_the_library(model: models.Model):
    tokenizer = Tokenizer(model)
    tokenizer.add_tokens(["maybe"])
    asked = ("maybe", "yes", "no")
    found = token_ids(tokenizer.to_str().encode(), asked)
    assert list(found) == [tokenizer.token_to_id(token) for token in asked]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"no": 1}}}'])
def test_a_token_that_is_not_there_is_named(content: bytes):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        token_ids(content, ("yes",))
