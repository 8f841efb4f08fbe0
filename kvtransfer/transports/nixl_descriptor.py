"""Descriptors of the `nixl` transport: all that a reader must know of a worker's memory.

It has two forms. A pool whose blocks lie whole has the first one, an address, which workers of versions before regions
read as well. Any other pool has the second one, a list of regions, which they refuse in words: a producer does not
offer it to them (`has_regions`).
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

from kvtransfer.ids import WorkerId
from kvtransfer.regions import Region, one_region
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.one_sided import Whereabouts
from kvtransfer.transports.sealed import Seal


@dataclass(frozen=True, slots=True)
class NixlDescriptor:
    """All that a reader must know of a pool."""

    worker_id: WorkerId
    num_blocks: int
    block_bytes: int
    regions: tuple[Region, ...]
    generations_address: int
    whereabouts: Whereabouts
    agent_metadata: bytes

    _SEAL: ClassVar = Seal("nixl", b"BTNX", 3)
    _NUMBERS: ClassVar = struct.Struct("<QQQQQ")
    _SEAL_OF_REGIONS: ClassVar = Seal("nixl", b"BTNX", 4)
    _NUMBERS_OF_REGIONS: ClassVar = struct.Struct("<QQQQI")
    _REGION: ClassVar = struct.Struct("<QQQQ")

    def pack(self) -> bytes:
        """Packs this, in the first form where it can be."""
        rest = self.whereabouts.pack() + self.agent_metadata
        first = self.regions[0]
        if self.regions == one_region(first.address, self.block_bytes):
            numbers = self.worker_id, first.address, self.num_blocks, self.block_bytes, self.generations_address
            return self._SEAL.close(self._NUMBERS.pack(*numbers) + rest)
        numbers = self.worker_id, self.num_blocks, self.block_bytes, self.generations_address, len(self.regions)
        regions = [self._REGION.pack(each.address, each.stride, each.start, each.end) for each in self.regions]
        return self._SEAL_OF_REGIONS.close(b"".join((self._NUMBERS_OF_REGIONS.pack(*numbers), *regions, rest)))

    @classmethod
    def has_regions(cls, packed: bytes) -> bool:
        """Tells whether bytes, which may be anything, are a descriptor of the second form."""
        return cls._SEAL_OF_REGIONS.is_of(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> "NixlDescriptor":
        """Reads what `pack` made. Raises TransportError for anything else."""
        if cls._SEAL.is_of(packed):
            body = cls._SEAL.open(packed, cls._NUMBERS.size + Whereabouts.BODY.size)
            worker_id, address, num_blocks, block_bytes, generations = cls._NUMBERS.unpack_from(body)
            regions, end = one_region(address, block_bytes), cls._NUMBERS.size
        else:
            start = cls._NUMBERS_OF_REGIONS.size
            body = cls._SEAL_OF_REGIONS.open(packed, start + Whereabouts.BODY.size)
            worker_id, num_blocks, block_bytes, generations, count = cls._NUMBERS_OF_REGIONS.unpack_from(body)
            end = start + count * cls._REGION.size
            if len(body) < end + Whereabouts.BODY.size:
                raise TransportError(f"a descriptor without its {count} regions")
            regions = tuple(Region(*numbers) for numbers in cls._REGION.iter_unpack(body[start:end]))
        where, metadata = body[end : end + Whereabouts.BODY.size], body[end + Whereabouts.BODY.size :]
        return cls(
            WorkerId(worker_id),
            num_blocks,
            block_bytes,
            regions,
            generations,
            Whereabouts.unpack(where),
            metadata,
        )
