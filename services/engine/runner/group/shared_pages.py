"""Memory that the processes of a group share: a file without a name (memfd), which ends with the last of them."""

import mmap
import os
from typing import Self

import numpy as np


class SharedPages:
    """Zeroed memory, mapped by whoever has the descriptor. It costs nothing before it is touched."""

    def __init__(self, file: int) -> None:
        """Maps the file, which stays open as long as this exists. Raises OSError."""
        self.file = file
        num_bytes = os.fstat(file).st_size
        self._memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.array = np.frombuffer(self._memory, dtype=np.uint8)  # uint8[num_bytes], page aligned

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Self:
        """Makes memory of so many bytes. name: for /proc. Raises OSError."""
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)
            os.truncate(file, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            return cls(file)
        except BaseException:
            os.close(file)
            raise
