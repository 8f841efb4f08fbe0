"""The id under which a worker publishes what it caches: its incarnation, and how often it had to begin anew.

A worker that cannot say any more which of its entries are still true takes a new id, publishes everything under it and
leaves the old entries to the sweep.
"""

import struct

_ID = struct.Struct(">QI")
ID_BYTES = _ID.size


def pack_id(incarnation: int, epoch: int) -> bytes:
    """12 bytes, the incarnation first."""
    return _ID.pack(incarnation, epoch)


def unpack_id(id: bytes) -> tuple[int, int]:
    """Incarnation and epoch."""
    incarnation, epoch = _ID.unpack(id)
    return incarnation, epoch
