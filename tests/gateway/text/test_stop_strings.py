"""A stop string ends a text before itself, however the text is cut into tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizer_files import byte_level

TOKENIZER = Tokenizer(byte_level(), {})


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: read character by character until one stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_result_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject):
    scanner = StopStrings(stops)
    shown, rest = "", text
    while rest and scanner.matched is None:
        size = data.draw(st.integers(1, len(rest)))
        shown += scanner.feed(rest[:size])
        rest = rest[size:]
        # What was shown is never taken back.
        assert expected(text, stops)[0].startswith(shown)
    stopped = scanner.matched is not None
    assert (shown if stopped else shown + scanner.flush(), stopped) == expected(text, stops)


def test_only_what_may_be_a_beginning_is_held_back():
    scanner = StopStrings(["</end>", "stop"])
    assert scanner.feed("all of this") == "all of thi"  # the s could begin "stop"
    assert scanner.feed(" </e") == "s "
    assert scanner.feed("x") == "</ex"
    assert scanner.flush() == ""


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_stop_string_over_several_tokens(size: int):
    tokens = TOKENIZER.backend.encode("The quick brown fox", add_special_tokens=False).ids
    text = SequenceText(make_detokenizer(TOKENIZER, []), ("k bro",), min_tokens=0)
    shown, used = "", 0
    for start in range(0, len(tokens), size):
        piece = text.feed(tokens[start : start + size])
        shown += piece.text
        used += piece.num_tokens
        if piece.stopped:
            break
    assert shown == "The quic"
    # Counted up to the token that completed the stop string.
    assert "k bro" in TOKENIZER.backend.decode(tokens[:used])
    assert "k bro" not in TOKENIZER.backend.decode(tokens[: used - 1])


def test_stop_strings_do_not_count_before_min_tokens():
    tokens = TOKENIZER.backend.encode("abcabc", add_special_tokens=False).ids
    assert len(tokens) == 6
    text = SequenceText(make_detokenizer(TOKENIZER, []), ("c",), min_tokens=3)
    piece = text.feed(tokens)
    assert (piece.text, piece.num_tokens, bool(piece.stopped)) == ("abcab", 6, True)


def test_held_text_comes_at_the_end():
    text = SequenceText(make_detokenizer(TOKENIZER, []), ("fox!",), min_tokens=0)
    piece = text.feed(TOKENIZER.backend.encode("a fox", add_special_tokens=False).ids)
    assert piece.text + text.flush() == "a fox"
    assert piece.text == "a "
