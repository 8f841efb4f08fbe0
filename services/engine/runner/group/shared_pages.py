"""Memory that the processes of a group share: a file without a name (memfd), which ends with the last of them."""

import os
from typing import Self

from services.engine.kernels.cpu.shared_file import HUGE_BYTES, Mapping


class SharedPages:
    """Zeroed memory, mapped by whoever has the descriptor, at a border of huge pages: what asks the kernel for pages
    (`populate`) may get huge ones, which are read faster here and by other processes. It costs nothing before it is
    touched.
    """

    def __init__(self, file: int) -> None:
        """Maps the file, which stays open as long as the memory is in use. Raises OSError."""
        self.file = file
        self.array = Mapping(file, os.fstat(file).st_size, writable=True).array()  # uint8[num_bytes]

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Self:
        """Makes memory of so many bytes. name: for /proc. Raises OSError."""
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)
            os.truncate(file, -(-num_bytes // HUGE_BYTES) * HUGE_BYTES)
        except BaseException:
            os.close(file)
            raise
        return cls(file)
