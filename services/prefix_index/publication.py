"""The id under which a worker publishes what it caches: its worker id, and how often it had to begin anew.

A worker that cannot say any more which of its entries are still true takes a new id, publishes everything under it and
leaves the old entries to the sweep.
"""

import struct

from kvtransfer.ids import WorkerId

_ID = struct.Struct(">QI")
ID_BYTES = _ID.size


def pack_id(worker_id: WorkerId, epoch: int) -> bytes:
    """12 bytes, the worker id first."""
    return _ID.pack(worker_id, epoch)


def unpack_id(id: bytes) -> tuple[WorkerId, int]:
    """WorkerId and epoch. Raises ValueError for bytes of another length."""
    if len(id) != ID_BYTES:
        raise ValueError(f"an id of {len(id)} bytes, not {ID_BYTES}")
    worker_id, epoch = _ID.unpack(id)
    return WorkerId(worker_id), epoch
