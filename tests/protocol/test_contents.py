"""Names of blocks: one for each prefix of contents, by fingerprint and namespace, and those that it always had."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.protocol.block_hash import block_hashes, block_names, namespace_hash, root_hash, top_hash
from services.protocol.contents import COMMON, Contents, Media, Namespace, with_length
from tests.protocol.drawn_contents import CONTENTS, NAMESPACES, TEXTS, identities

IDS = np.array([1, 2, 256, -1, 70000, 3, 9], np.int32)
NAMED = tuple[str, Namespace, Contents]

# Written by the code of commit 6134829, which knew fingerprint, salt and token ids alone.
VECTORS = {
    ("model", ""): "09abe8f8f5288ab28638ad78f78f281c99b7fb54c717e29e0f528981019af38b8ff0e418670ae1fdf3c80d7fba47010a",
    ("model", "salt"): (
        "76fcf0dd9ead138c3eb2b2506322d9611a9f9cabfecda89d1bca3fa468356319ce81d3d67e30ea0c85595e573e12c944"
    ),
    ("", "salt"): "6feda2577a62a3b64f6e9973a0ebbb60894c6d323ede12a1af377cfd4929a3814152c6af1b7fad8bb5cb533180cf7106",
    ("fingerprint", "ä tenant"): (
        "14a0b8c34ec072a913dafb6e003a97a61badf12688481d4d33771b5d8e7c7c75105073eae429c2fb4e0b5c5ca09e9b1c"
    ),
}


@pytest.mark.parametrize(("fingerprint", "salt"), VECTORS)
def test_blocks_of_ids_below_a_salt_have_the_names_that_they_had(fingerprint: str, salt: str):
    """Else a version would not find what the one beside it publishes."""
    names = block_names(fingerprint, Namespace(salt), Contents(IDS), 2)
    assert b"".join(names).hex() == VECTORS[fingerprint, salt]
    assert block_hashes(root_hash(fingerprint, Namespace(salt)), IDS, 2) == names


def ids(*values: int) -> Contents:
    return Contents(np.array(values, np.int32))


def image(digest: bytes, start: int = 0, length: int = 2) -> Contents:
    return Contents(np.zeros(4, np.int32), (Media(start, length, digest),))


@given(st.lists(st.tuples(TEXTS, NAMESPACES, CONTENTS), min_size=2, max_size=6), st.integers(1, 3))
@example(
    [("f", Namespace("ab", ""), ids(1)), ("f", Namespace("a", "b"), ids(1)), ("f", Namespace("", "ab"), ids(1))], 1
)
@example([("f", Namespace("ab", "c"), ids(1)), ("f", Namespace("a", "bc"), ids(1))], 1)
@example([("f", Namespace("a"), ids(1)), ("fa", COMMON, ids(1)), ("", Namespace("fa"), ids(1))], 1)
@example([("f", COMMON, image(b"a")), ("f", COMMON, image(b"b")), ("f", COMMON, ids(0, 0, 0, 0))], 1)
@example([("f", COMMON, image(b"a", length=1)), ("f", COMMON, image(b"a")), ("f", COMMON, image(b"a", start=1))], 2)
def test_equal_names_are_of_equal_prefixes_in_equal_namespaces_and_no_others(named: list[NAMED], block_size: int):
    by_name: dict[bytes, object] = {}
    by_identity: dict[object, bytes] = {}
    for fingerprint, namespace, contents in named:
        names = block_names(fingerprint, namespace, contents, block_size)
        for name, identity in zip(names, identities(fingerprint, namespace, contents, block_size), strict=True):
            assert by_name.setdefault(name, identity) == identity
            assert by_identity.setdefault(identity, name) == name


@given(st.lists(st.tuples(TEXTS, TEXTS), unique=True, min_size=2, max_size=6))
def test_no_salt_names_what_an_adapter_names(pairs: list[tuple[str, str]]):
    """Neither does one that a client makes of the bytes that an adapter's namespace is hashed from."""
    top = top_hash("f")
    assert len({namespace_hash(top, Namespace(salt, adapter)) for salt, adapter in pairs}) == len(pairs)
    for salt, adapter in pairs:
        forged = (with_length(salt.encode()) + with_length(adapter.encode())).decode()
        assert not adapter or namespace_hash(top, Namespace(forged)) != namespace_hash(top, Namespace(salt, adapter))


def test_a_mark_is_where_media_begin_and_names_all_that_begin_there():
    contents = Contents(np.zeros(12, np.int32), (Media(1, 2, b"a"), Media(3, 6, b"b"), Media(9, 3, b"c")))
    assert list(contents.marks(4)) == [0, 2]
    assert list(contents.marks(3)) == [0, 1, 3]
    first = contents.marks(4)[0]
    assert first != contents._replace(media=contents.media[:1]).marks(4)[0]
    two, number = (Media(1, 1, b"a"), Media(2, 1, b"b")), lambda value: value.to_bytes(8, "little")
    for numbers in ((2, 1), (2, 1, 1)):  # a digest that is made to look like the beginning of further media
        forged = (Media(1, 1, b"a" + b"".join(map(number, numbers)) + b"b"),)
        assert contents._replace(media=forged).marks(4) != contents._replace(media=two).marks(4)
    joined = contents._replace(media=(Media(1, 2, b"ab"), Media(3, 6, b""))).marks(4)[0]
    assert joined != contents._replace(media=(Media(1, 2, b"a"), Media(3, 6, b"b"))).marks(4)[0] == first


@pytest.mark.parametrize(
    "media",
    [
        (Media(0, 0, b"a"),),
        (Media(-1, 2, b"a"),),
        (Media(3, 2, b"a"),),
        (Media(0, 2, b"a"), Media(1, 1, b"b")),
        (Media(2, 1, b"a"), Media(0, 1, b"b")),
    ],
)
def test_media_that_are_no_part_of_the_contents_are_refused(media: tuple[Media, ...]):
    marks: Callable[[int], object] = Contents(np.zeros(4, np.int32), media).marks
    with pytest.raises(ValueError, match="media at"):
        marks(2)
