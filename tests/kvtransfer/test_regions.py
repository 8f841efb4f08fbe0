"""Regions of any group of ranks: each byte is read once, and written wherever it is. The oracle looks byte by byte."""

from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.regions import Region, areas, cover, cut, cut_by, one_region, ranges_of

BLOCK_BYTES = 24


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, ...]:
    """Of a few ranks: what one lacks, another has."""
    borders = sorted(draw(st.sets(st.integers(1, BLOCK_BYTES - 1), max_size=5)))
    edges = [0, *borders, BLOCK_BYTES]
    pieces = list(pairwise(edges))
    extra = st.tuples(st.integers(0, BLOCK_BYTES - 1), st.integers(1, BLOCK_BYTES)).filter(lambda own: own[0] < own[1])
    pieces = draw(st.permutations([*pieces, *draw(st.lists(extra, max_size=3))]))
    return tuple(
        Region(1000 * number, end - start + draw(st.integers(0, 5)), start, end)
        for number, (start, end) in enumerate(pieces, 1)
    )


def address_of(region: Region, block: int, byte: int) -> int:
    """Of a byte of a block, as a region says it; independent of `Region.part`."""
    return region.address + block * region.stride + byte - region.start


@given(regions())
def test_each_byte_is_read_once_from_the_first_region_that_has_it(every: tuple[Region, ...]) -> None:
    found = cover(every, BLOCK_BYTES)
    read = [(byte, address_of(part, 3, byte)) for part in found for byte in range(part.start, part.end)]
    assert [byte for byte, _ in read] == list(range(BLOCK_BYTES))
    for byte, address in read:
        having = [region for region in every if region.start <= byte < region.end]
        assert address in [address_of(region, 3, byte) for region in having]
    first = next(region for region in every if region.start == 0)
    assert read[0][1] == address_of(first, 3, 0)


@given(regions(), regions())
def test_cuts_write_each_byte_wherever_it_is_and_read_it_from_one_place(
    local: tuple[Region, ...], remote: tuple[Region, ...]
) -> None:
    written: list[tuple[int, int]] = []
    read: dict[int, set[int]] = {}
    for here, there in cut(local, remote, BLOCK_BYTES):
        assert (here.start, here.end) == (there.start, there.end)
        for byte in range(here.start, here.end):
            written.append((byte, address_of(here, 2, byte)))
            read.setdefault(byte, set()).add(address_of(there, 5, byte))
    wanted = [(byte, address_of(region, 2, byte)) for region in local for byte in range(region.start, region.end)]
    assert sorted(written) == sorted(wanted)
    once = {
        byte: address_of(part, 5, byte) for part in cover(remote, BLOCK_BYTES) for byte in range(part.start, part.end)
    }
    assert read == {byte: {address} for byte, address in once.items()}


@given(regions(), regions(), st.integers(1, 3))
def test_cuts_of_several_parts_are_those_of_one_that_has_all_of_their_regions(
    local: tuple[Region, ...], remote: tuple[Region, ...], num_parts: int
) -> None:
    """In the order in which the parts are named: part n has every num_parts-th region, from the n-th on."""
    parts = [remote[number::num_parts] for number in range(num_parts)]
    every = [region for part in parts for region in part]
    found = cut_by(local, parts, BLOCK_BYTES)
    assert sorted(chain(*found), key=repr) == sorted(cut(local, every, BLOCK_BYTES), key=repr)
    for part, pairs in zip(parts, found, strict=True):
        for _, there in pairs:
            assert any(each.start <= there.start and there.end <= each.end for each in part)


@given(regions(), st.integers(0, 2))
def test_of_parts_that_have_the_same_bytes_the_first_that_is_named_is_read(
    local: tuple[Region, ...], first: int
) -> None:
    whole = [one_region(number * 1000, BLOCK_BYTES) for number in range(3)]
    found = cut_by(local, whole, BLOCK_BYTES, first)
    assert [bool(pairs) for pairs in found] == [number == first for number in range(3)]


@given(regions(), st.integers(1, 8))
def test_the_bytes_of_regions_are_told_once_and_in_order(every: tuple[Region, ...], num: int) -> None:
    having = {byte for region in every[:num] for byte in range(region.start, region.end)}
    found = ranges_of(every[:num])
    assert [byte for own in found for byte in own] == sorted(having)
    assert all(first.stop < second.start for first, second in pairwise(found))


def test_blocks_that_both_sides_hold_whole_are_read_whole() -> None:
    local, remote = one_region(4096, BLOCK_BYTES), one_region(9000, BLOCK_BYTES)
    assert cut(local, remote, BLOCK_BYTES) == [(local[0], remote[0])]


@pytest.mark.parametrize(
    ("every", "words"),
    [
        ([], "byte 0"),
        ([Region(0, 8, 0, 8)], "byte 8"),
        ([Region(0, 8, 0, 8), Region(0, 8, 9, 24)], "byte 8"),
        ([Region(0, 24, 0, 24), Region(0, 8, 20, 25)], "not in a block"),
        ([Region(0, 24, 0, 24), Region(0, 8, 5, 5)], "not in a block"),
        ([Region(0, 24, -1, 24)], "not in a block"),
    ],
)
def test_regions_that_are_not_those_of_a_block_are_refused(every: list[Region], words: str) -> None:
    """They may come from a neighbour's descriptor."""
    with pytest.raises(ValueError, match=words):
        cover(every, BLOCK_BYTES)


def bytes_in(found: Sequence[tuple[int, int]]) -> set[int]:
    return {address for first, num_bytes in found for address in range(first, first + num_bytes)}


@given(regions(), st.data())
def test_areas_have_all_bytes_of_a_range_and_none_outside_its_blocks(
    every: tuple[Region, ...], data: st.DataObject
) -> None:
    num_blocks = 4
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, num_blocks * BLOCK_BYTES)] * 2)))
    wanted = {
        address_of(region, at // BLOCK_BYTES, at % BLOCK_BYTES)
        for at in range(first, end)
        for region in every
        if region.start <= at % BLOCK_BYTES < region.end
    }
    found = areas(every, BLOCK_BYTES, first, end)
    assert wanted <= bytes_in(found)
    assert bool(found) == bool(wanted)
    spans = [
        range(address_of(region, 0, region.start), address_of(region, num_blocks - 1, region.end)) for region in every
    ]
    assert all(any(address in span for span in spans) for address in bytes_in(found))
    assert sum(num_bytes for _, num_bytes in found) == len(bytes_in(found)), "an address is in two areas"


def test_areas_of_whole_blocks_are_exact() -> None:
    assert areas(one_region(4096, BLOCK_BYTES), BLOCK_BYTES, 7, 50) == [(4096 + 7, 43)]


def test_a_pool_with_several_regions_is_one_area() -> None:
    """A rank's memory is registered once, whichever layers of its heads it has."""
    heads = (Region(1000, 8, 0, 4), Region(1004, 8, 12, 16), Region(5000, 16, 4, 12), Region(5008, 16, 16, 24))
    assert areas(heads, BLOCK_BYTES, 0, 3 * BLOCK_BYTES) == [(1000, 24), (5000, 48)]
