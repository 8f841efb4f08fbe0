"""Whatever a client sends, a parser returns what it is for, or refuses it in words; nothing else is raised.

`python -m tests.fuzz_bytes` asks the same of far more bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.errors import ApiError
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.schema import CommonRequest
from services.gateway.api.requests.validation import parse_request, validate_request
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL

KINDS: list[tuple[type[CommonRequest], Any]] = [(ChatRequest, CHAT_NEUTRAL), (CompletionRequest, COMPLETIONS_NEUTRAL)]
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHAT_NEUTRAL, "nobody"})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from(NAMES), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


def assert_taken_or_refused(parse: Callable[[], object]) -> None:
    error = None
    try:
        parse()
    except ApiError as raised:
        error = raised
    assert error is None or (error.status == 400 and error.message and len(error.envelope()) < 4096)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "neutral"), KINDS)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(value=BODIES)
def test_an_object_is_a_request_or_refused(kind: type[CommonRequest], neutral: Any, value: dict[str, Any]) -> None:
    def parse() -> None:
        request = validate_request(value, kind, neutral)
        request.check_combinations()
        list(request.unknown_fields())

    assert_taken_or_refused(parse)


@pytest.mark.parametrize(("kind", "neutral"), KINDS)
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(body=st.binary(max_size=40) | st.text(alphabet='{}[]",:0-9.eE\\nulltrfas ', max_size=40).map(str.encode))
def test_bytes_are_a_request_or_refused(kind: type[CommonRequest], neutral: Any, body: bytes) -> None:
    assert_taken_or_refused(partial(parse_request, body, kind, neutral))


@pytest.mark.parametrize("form", ["json", "regex", "grammar"])
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(text=st.text(min_size=1, max_size=30) | st.text(alphabet='start: root::="a"|()[]{}*+?\n/#%', min_size=1))
def test_a_text_is_a_grammar_or_refused(form: str, text: str) -> None:
    def parse() -> None:
        request = validate_request({"prompt": "x", "structured_outputs": {form: text}}, CompletionRequest, {})
        assert grammar_of(None, request.structured_outputs)[1] == "structured_outputs"

    assert_taken_or_refused(parse)
