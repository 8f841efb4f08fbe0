"""OpenAI's client for Python: embeddings, which need no handoff."""

import math

import pytest

from tests.clients.asked import MODEL
from tests.e2e.stack import Stack


def test_embeddings_are_the_same_in_both_encodings(stack: Stack):
    texts, client = ["one", "two three"], stack.gateway.client
    read = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64 of its own accord
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for first, second in zip(read.data, floats.data, strict=True):
        assert first.embedding == pytest.approx(second.embedding, abs=1e-6)
        assert math.hypot(*first.embedding) == pytest.approx(1, abs=1e-5)
    stack.gateway.wait_for_baseline()
