"""Pairs of texts as tokens: which tokens go where there are too many."""

import pytest

from services.gateway.text.tokenizer import longest_first


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
