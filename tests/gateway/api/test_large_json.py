"""JSON read in slices: the values are orjson's, and so are the refusals."""

import json
from random import Random
from typing import Any

import orjson
import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.requests.large_json import MAX_NUMBERS, MAX_VALUES, JsonError, read_large, takes_long


def outcome(read: Any, body: bytes) -> str:
    """The value, or that there is none; as text, since NaN and 1.0 and 1 are to be told apart."""
    try:
        return repr(read(body))
    except (JsonError, orjson.JSONDecodeError):
        return "refused"


def assert_like_orjson(body: bytes) -> str:
    mine = outcome(read_large, body)
    assert mine == outcome(orjson.loads, body), body[:200]
    return mine


def random_value(random: Random, depth: int = 0) -> Any:
    match random.randrange(7 if depth < 4 else 4):
        case 0:
            return random.choice([1, -5, 0, 2**40, 10**25, 1.5, -2e-8, True, False, None])
        case 1:
            return "".join(random.choices('ab"\\\n\té日🙂\u0001/ ', k=random.randrange(30)))
        case 2:
            return [random.randrange(1000) for _ in range(random.randrange(20))]
        case 3:
            return [random.choice([1, 2.5, "a", None, -3]) for _ in range(random.randrange(6))]
        case 4:
            return [random_value(random, depth + 1) for _ in range(random.randrange(5))]
        case _:
            names = random.choices(["a", 'b"', "é", "\\x", "\n"], k=random.randrange(5))
            return {name: random_value(random, depth + 1) for name in names}


def damaged(random: Random, body: bytes) -> bytes:
    at, other = random.randrange(len(body)), random.choice(b'{}[]",:\\1e-. \xff\x80u').to_bytes()
    return body[:at] + random.choice([other, b"", other + body[at : at + 1]]) + body[at + 1 :]


def test_any_text_is_read_as_orjson_reads_it():
    random, outcomes = Random(3), []
    for _ in range(2000):
        indent, separators = random.choice([(None, None), (None, (",", ":")), (1, None)])
        text = json.dumps(
            random_value(random), ensure_ascii=random.random() < 0.5, indent=indent, separators=separators
        )
        outcomes.append(assert_like_orjson(text.encode()))
        outcomes.append(assert_like_orjson(damaged(random, text.encode())))
    assert 200 < outcomes.count("refused") < 2000


@pytest.mark.parametrize("text", ["é" * 100_000, "🙂" * 60_000, '"\\' * 50_000, "a🙂\n" * 40_000], ids=ascii)
@pytest.mark.parametrize("escaped", [False, True])
def test_no_character_is_cut_between_slices(text: str, escaped: bool):
    for shift in range(4):
        assert_like_orjson(json.dumps(["x" * shift + text], ensure_ascii=escaped).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 100_000 + b"2]",
        b"[" + b"1," * 100_000 + b"]",
        b"[" + b"1, " * 100_000 + b'"a", 5, 6]',
        b"[" + b"1" * 70_000 + b"]",
        b"[" + b" " * 70_000 + b"1" + b" " * 70_000 + b",2]",
        b"[1" + b" " * 200_000,
        b"[1,,2]",
        b"[1 2]",
        b"[01]",
        b"[-]",
        b'"abc',
        b'"abc\\',
        b'{"a":"\\ud800"}',
        b'{"a" 1}',
        b'{"a":1,}',
        b"{1:2}",
        b"[NaN]",
        b"",
        b"\xef\xbb\xbf{}",
        b"[]]",
        b"[" * 60 + b"]" * 60,
    ],
    ids=lambda body: ascii(body[:20]),
)
def test_odd_texts_are_read_as_orjson_reads_them(body: bytes):
    assert_like_orjson(body)


def test_too_deep_a_text_is_refused_in_python_s_own_depth():
    for body in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 65 + b"]" * 65):
        with pytest.raises(JsonError, match="deep"):
            read_large(body)


@pytest.mark.parametrize(
    ("entry", "limit"),
    [(b"{}", MAX_VALUES - 1), (b'""', MAX_VALUES - 1), (b"null", MAX_VALUES - 1), (b"7", MAX_NUMBERS)],
)
def test_the_number_of_values_is_limited_while_they_are_read(entry: bytes, limit: int):
    assert len(read_large(b"[" + b",".join([entry] * limit) + b"]")) == limit
    with pytest.raises(ApiError, match="more than"):
        read_large(b"[" + b",".join([entry] * (limit + 1)) + b',"never read')


def test_only_large_bodies_take_long():
    assert not takes_long(b"," * 16_000)
    assert takes_long(b"," * 17_000)
    assert not takes_long(b"x" * 200_000)
    assert takes_long(b"x" * 300_000)
