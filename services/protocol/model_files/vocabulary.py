"""The ids of single tokens, by a tokenizer.json as it is written, without the library that reads all of it."""

import json
from collections.abc import Sequence

from services.protocol.model_files.base import ModelError


def token_ids(tokenizer: bytes, tokens: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of tokens, by their texts in the vocabulary or among the added tokens. Raises ModelError for one
    that is not there.
    """
    try:
        values = json.loads(tokenizer)
        vocab = values["model"]["vocab"]
        entries = vocab.items() if isinstance(vocab, dict) else ((text, id) for id, (text, _) in enumerate(vocab))
        ids = {text: id for text, id in entries if text in tokens}
        ids |= {
            added["content"]: added["id"] for added in values.get("added_tokens") or () if added["content"] in tokens
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"tokenizer.json has no vocabulary that can be read: {error}") from error
    for token in tokens:
        if token not in ids:
            raise ModelError(f"tokenizer.json has no token {token!r}, which classifier_from_token in config.json names")
    return tuple(int(ids[token]) for token in tokens)
