"""Descriptors on the wire: magic, version, CRC-32 of the body, and the body.

The checksum finds damage, not malice: descriptors come only from registered workers.
"""

import struct
import zlib
from dataclasses import dataclass

from kvtransfer.transports.base import TransportError

_HEAD = struct.Struct("<4sHI")
_HEAD_START = struct.Struct("<4sH")


@dataclass(frozen=True, slots=True)
class Seal:
    """The form of one transport's descriptors."""

    transport: str
    magic: bytes  # four bytes
    version: int

    def close(self, body: bytes) -> bytes:
        """Makes a descriptor of a body."""
        return _HEAD.pack(self.magic, self.version, zlib.crc32(body)) + body

    def is_of(self, descriptor: bytes) -> bool:
        """Tells whether a descriptor says that it is of this transport and version. Nothing else is looked at."""
        return descriptor.startswith(_HEAD_START.pack(self.magic, self.version))

    def open(self, descriptor: bytes, min_bytes: int) -> bytes:
        """Returns the body, of at least `min_bytes`. Raises TransportError for anything that `close` did not make."""
        if len(descriptor) < _HEAD.size + min_bytes or not descriptor.startswith(self.magic):
            raise TransportError(f"not a descriptor of the {self.transport} transport")
        _, version, checksum = _HEAD.unpack_from(descriptor)
        body = descriptor[_HEAD.size :]
        if version != self.version:
            raise TransportError(f"descriptor version {version}, this worker knows {self.version}")
        if zlib.crc32(body) != checksum:
            raise TransportError("a damaged descriptor")
        return body
