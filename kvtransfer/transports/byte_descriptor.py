"""Descriptors of the `grpc` transport: all that a reader must know of a source of bytes.

It has two forms. A source of whole blocks has the first one, which workers of versions before parts read as well. The
source of a part of every block has the second one, with the ranges that it has.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.sealed import Seal

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ByteDescriptor:
    """All that a reader must know of a source."""

    worker_id: WorkerId
    num_blocks: int
    block_bytes: int  # of a whole block
    key: bytes
    ranges: tuple[range, ...]  # of a block that the source has

    _SEAL: ClassVar = Seal("grpc", b"BTBS", 1)
    _SEAL_OF_RANGES: ClassVar = Seal("grpc", b"BTBS", 2)
    _BODY: ClassVar = struct.Struct(f"<QQQ{KEY_BYTES}s")
    _RANGE: ClassVar = struct.Struct("<QQ")

    def pack(self) -> bytes:
        """Packs this, in the first form where it can be."""
        body = self._BODY.pack(self.worker_id, self.num_blocks, self.block_bytes, self.key)
        if self.ranges == (range(self.block_bytes),):
            return self._SEAL.close(body)
        ranges = (self._RANGE.pack(own.start, own.stop) for own in self.ranges)
        return self._SEAL_OF_RANGES.close(body + b"".join(ranges))

    @classmethod
    def unpack(cls, packed: bytes) -> "ByteDescriptor":
        """Reads what `pack` made. Raises TransportError for anything else."""
        if cls._SEAL.is_of(packed):
            worker_id, num_blocks, block_bytes, key = cls._BODY.unpack_from(cls._SEAL.open(packed, cls._BODY.size))
            return cls(WorkerId(worker_id), num_blocks, block_bytes, key, (range(block_bytes),))
        body = cls._SEAL_OF_RANGES.open(packed, cls._BODY.size)
        worker_id, num_blocks, block_bytes, key = cls._BODY.unpack_from(body)
        if (len(body) - cls._BODY.size) % cls._RANGE.size:
            raise TransportError("a descriptor with half a range")
        ranges = tuple(range(*numbers) for numbers in cls._RANGE.iter_unpack(body[cls._BODY.size :]))
        if any(not own.start < own.stop <= block_bytes for own in ranges):
            raise TransportError(f"ranges that are not in a block of {block_bytes} bytes")
        return cls(WorkerId(worker_id), num_blocks, block_bytes, key, ranges)
