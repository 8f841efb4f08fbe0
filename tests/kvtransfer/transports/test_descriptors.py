"""Descriptors: of whole blocks as versions before regions write and read them, of regions in a form apart."""

from dataclasses import replace

import pytest

from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region, one_region
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.byte_descriptor import ByteDescriptor
from kvtransfer.transports.nixl_descriptor import NixlDescriptor
from kvtransfer.transports.one_sided import Means, Whereabouts
from kvtransfer.transports.parts import PartOffer, has_parts, join_parts, parts_of
from kvtransfer.transports.sealed import Seal

WHOLE = NixlDescriptor(
    worker_id=WorkerId(5),
    num_blocks=24,
    block_bytes=4608,
    regions=one_region(0x10000, 4608),
    generations_address=0x20000,
    whereabouts=Whereabouts(b"b" * 36, 77, Means.CMA, 0x7000, b"p" * 16),
    agent_metadata=b"metadata",
)
# What commit 3609b2c7, which knew no regions, made of the same values.
OLDER = bytes.fromhex(
    "42544e5803002aec3785"
    "0500000000000000" "0000010000000000" "1800000000000000" "0012000000000000" "0000020000000000"
    + "62" * 36 + "4d000000" "01000000" "0070000000000000" + "70" * 16 + "ffffffff" + "00" * 64 + "6d65746164617461"
)  # fmt: skip
OLDER_SEAL = Seal("nixl", b"BTNX", 3)
TWO = replace(WHOLE, regions=(Region(0x10000, 3000, 0, 3000), Region(0x80000, 1608, 3000, 4608)))
ONE_AMONG_OTHERS = replace(WHOLE, regions=(Region(0x10000, 5000, 0, 4608),))  # whole blocks with gaps between them


def test_a_pool_of_whole_blocks_has_the_descriptor_of_earlier_versions() -> None:
    assert WHOLE.pack() == OLDER
    assert NixlDescriptor.unpack(OLDER) == WHOLE
    assert not NixlDescriptor.has_regions(OLDER)


@pytest.mark.parametrize("descriptor", [TWO, ONE_AMONG_OTHERS])
def test_earlier_versions_refuse_a_pool_of_regions_in_words(descriptor: NixlDescriptor) -> None:
    assert NixlDescriptor.unpack(descriptor.pack()) == descriptor
    assert NixlDescriptor.has_regions(descriptor.pack())
    with pytest.raises(TransportError, match="version 4, this worker knows 3"):
        OLDER_SEAL.open(descriptor.pack(), 0)


def test_earlier_versions_refuse_a_worker_of_several_parts_in_words() -> None:
    joined = join_parts([PartOffer("", TWO.pack()), PartOffer("10.0.0.2:7000", WHOLE.pack())])
    assert has_parts(joined)
    assert not has_parts(TWO.pack())
    with pytest.raises(TransportError, match="not a descriptor of the nixl transport"):
        NixlDescriptor.unpack(joined)


def test_the_parts_of_a_worker_are_found_again() -> None:
    offers = PartOffer("", TWO.pack()), PartOffer("10.0.0.2:7000", WHOLE.pack())
    assert parts_of("host:1", join_parts(offers)) == (replace(offers[0], address="host:1"), offers[1])
    assert parts_of("host:1", WHOLE.pack()) == (PartOffer("host:1", WHOLE.pack()),)


def unpacked(descriptor: bytes) -> list[NixlDescriptor]:
    return [NixlDescriptor.unpack(offer.descriptor) for offer in parts_of("host:1", descriptor)]


def test_parts_that_are_damaged_or_cut_off_are_refused() -> None:
    good = join_parts([PartOffer("", b"abc"), PartOffer("10.0.0.2:7000", b"defg")])
    flipped = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(4, len(good))]
    for packed in (*flipped, *(good[:size] for size in range(6, len(good)))):
        with pytest.raises(TransportError):
            unpacked(packed)
    body = good[10:]
    for wrong in (body[:-1], body + b"x", b"\xff" + body[1:], bytes(4), body[:19] + b"\xff" + body[20:]):
        with pytest.raises(TransportError):
            parts_of("host:1", Seal("parts", b"BTPT", 1).close(wrong))


def test_a_source_of_whole_blocks_has_the_descriptor_of_earlier_versions() -> None:
    whole = ByteDescriptor(WorkerId(5), 24, 4608, b"k" * 16, (range(4608),))
    numbers = "050000000000000018000000000000000012000000000000"
    assert whole.pack() == Seal("grpc", b"BTBS", 1).close(bytes.fromhex(numbers) + b"k" * 16)
    assert ByteDescriptor.unpack(whole.pack()) == whole
    some = replace(whole, ranges=(range(5), range(70, 4608)))
    assert ByteDescriptor.unpack(some.pack()) == some
    for wrong in (replace(some, ranges=(range(5, 4609),)), replace(some, ranges=(range(5, 5),))):
        with pytest.raises(TransportError, match="not in a block"):
            ByteDescriptor.unpack(wrong.pack())
    with pytest.raises(TransportError, match="half a range"):
        ByteDescriptor.unpack(Seal("grpc", b"BTBS", 2).close(some.pack()[10:-1]))


def test_a_later_version_is_refused_in_words() -> None:
    with pytest.raises(TransportError, match="version 5, this worker knows 4"):
        NixlDescriptor.unpack(Seal("nixl", b"BTNX", 5).close(OLDER[10:]))


def test_a_descriptor_of_regions_that_is_damaged_or_cut_off_is_refused() -> None:
    good = TWO.pack()
    flipped = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(len(good))]
    for packed in (*flipped, *(good[:size] for size in range(len(good)))):
        with pytest.raises(TransportError):
            NixlDescriptor.unpack(packed)


def test_more_regions_than_there_are_bytes_are_refused() -> None:
    seal, numbers = NixlDescriptor._SEAL_OF_REGIONS, NixlDescriptor._NUMBERS_OF_REGIONS
    body = TWO.pack()[10:]
    for count in (8, 1 << 31):
        claimed = numbers.pack(*numbers.unpack_from(body)[:-1], count) + body[numbers.size :]
        with pytest.raises(TransportError, match=f"its {count} regions"):
            NixlDescriptor.unpack(seal.close(claimed))
