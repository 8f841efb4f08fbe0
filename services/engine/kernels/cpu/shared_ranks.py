"""`Ranks` of one host, by kernels, through a file without a name (memfd) that all of them map.

    | header | abort word | rank 0: slots of sums | ... | rank n | rank 0: slots of gathers | ... | rank n |

Of the file, only what is written takes memory, so it is as large as the largest step could need.

**No two results of a row are mixed up.** A row's results are counted when they are made, in this process's memory, not
when the kernels are recorded: so it makes no difference to the other ranks whether this one runs kernels directly,
records them, runs a recording again, or runs them by rows. As all ranks join the same results in the same order, their
counts are equal; flags also have the number of the step, so that a rank that missed a result is found.

**Two slots are enough for a row of sums.** A rank writes the result n + 2 over its result n. It does so after it has
collected n + 1, for which every other rank has published n + 1; and that rank did so after it had collected n. The
kernels of a row follow one another in every way of running them.

**No wait is forever while all ranks run.** Where kernels run one after the other, directly or in a recording, a rank
has published all rows of a result before it waits for any: the rank that is the furthest behind waits for nobody.
`by_rows` has one thread run all kernels for a block of rows, then take the next block, in increasing order. All ranks
cut the same blocks, whatever number of threads and columns each has (`RankSizes.blocks`). Take the first block that
some rank has not finished, and of the ranks that have not, the one that has joined the fewest results of it. A thread
of it is in this block: blocks before are done, so one was free for it. It waits for a row of this block: every other
rank has finished the block, or has joined as many results of it, and publishes all rows of one before it waits; so the
row is there.
With blocks of other borders on each rank that is not so: a rank would wait for a row of another one's later block.

A rank that ends leaves the others waiting. Whoever watches the processes calls `abort`.
"""

import mmap
import os
import time
from functools import cache
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from services.engine.kernels.base import BlockSizes
from services.engine.kernels.cpu import rank_sums
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.rank_sums import LINE_BYTES, AbortWord
from services.engine.kernels.cpu.recording import SCHED_YIELD
from services.engine.kernels.cpu.team import Kernel, the_team
from services.engine.kernels.ranks import RankLostError, part_of

_MAGIC = 0x52414E4B53  # "RANKS"
_PAGE, _ABORT_AT = 4096, 2048  # bytes
_LEAST_S = 1.0  # of which the rate of the time stamp is taken
_STEP_SHIFT = 20  # a base is the step's number, shifted


class RankSizes(NamedTuple):
    """The sizes that all ranks have in common."""

    size: int  # ranks
    max_rows: int  # of a step: its tokens, at most
    width: int  # the widest row that is added up
    vocab: int  # the widest row that is gathered
    item_bytes: int  # of a number: 2 for bfloat16, 4 for float32
    threads: int  # of each rank, about

    @property
    def dtype(self) -> str:
        """Returns the dtype of rows."""
        return next(name for name, element in ELEMENTS.items() if element.size == self.item_bytes)

    @property
    def blocks(self) -> BlockSizes:
        """Returns the sizes of blocks of rows. Ranks may have different numbers of columns between two products, so
        these are taken to be four times the width, together, as in most models.
        """
        return BlockSizes(self.threads, (self.width + 4 * self.width // self.size) * self.item_bytes)

    @property
    def sum_slot_bytes(self) -> int:
        """Returns the bytes of a row's slot of a sum."""
        return LINE_BYTES + _in_lines(self.width * self.item_bytes)

    @property
    def gather_slot_bytes(self) -> int:
        """Returns the bytes of a row's slot of a gather."""
        return 2 * LINE_BYTES + _in_lines(-(-self.vocab // self.size) * self.item_bytes)

    @property
    def gathers_at(self) -> int:
        """Returns the offset of the slots of gathers."""
        return _PAGE + self.size * 2 * self.max_rows * self.sum_slot_bytes

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the file."""
        return self.gathers_at + self.size * self.max_rows * self.gather_slot_bytes


class SharedRanks:
    """`Ranks` by kernels. `create` makes the memory, `join` maps it in another process."""

    is_kernel = True

    def __init__(self, fd: int, rank: int, sizes: RankSizes) -> None:
        """Maps the memory of the file, whose descriptor stays the caller's to close."""
        assert 0 <= rank < sizes.size, (rank, sizes.size)
        self.fd, self.rank, self.size, self.sizes = fd, rank, sizes.size, sizes
        self.blocks: BlockSizes | None = sizes.blocks
        self._memory = np.frombuffer(mmap.mmap(fd, sizes.num_bytes), dtype=np.uint8)
        self._start: int = self._memory.ctypes.data
        self._abort_word = self._memory[_ABORT_AT : _ABORT_AT + 8].view(np.int64)
        self._abort = self._start + _ABORT_AT
        # This process's own: numbers of the results of each row so far, and what the step's flags are counted from.
        self._sum_counts, self._gather_counts = (np.zeros(sizes.max_rows, dtype=np.int64) for _ in range(2))
        self._base = np.zeros(1, dtype=np.int64)
        self._waits = np.zeros((rank_sums.WAIT_LINES, LINE_BYTES // 8), dtype=np.int64)  # cycles, by thread
        self._kernels = _kernels(sizes.dtype)
        self._began, self._cycles_per_s = (time.monotonic(), self._cycles()), 0.0

    @classmethod
    def create(cls, sizes: RankSizes) -> Self:
        """Makes the memory, and returns rank 0. Raises OSError."""
        fd = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, sizes.num_bytes)
            header = np.array([_MAGIC, *sizes], dtype=np.int64)
            os.pwrite(fd, header.tobytes(), 0)
            return cls(fd, 0, sizes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def join(cls, fd: int, rank: int) -> Self:
        """Maps the memory that another process made, as the rank with this number. Raises OSError, and ValueError for
        another file.
        """
        magic, *numbers = np.frombuffer(os.pread(fd, 8 * (1 + len(RankSizes._fields)), 0), dtype=np.int64).tolist()
        if magic != _MAGIC:
            raise ValueError(f"descriptor {fd} is no memory of ranks")
        return cls(fd, rank, RankSizes(*numbers))

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks.sum`. The sum takes the place of x, whose rows may lie apart."""
        sizes, (rows, width) = self.sizes, x.shape
        assert rows <= sizes.max_rows, (rows, sizes.max_rows)
        assert width <= sizes.width, (width, sizes.width)
        self._check_rows(x)
        slot_bytes, team = sizes.sum_slot_bytes, the_team()
        slots, rank_bytes = self._start + _PAGE, 2 * sizes.max_rows * slot_bytes
        of_rows = x.data_ptr(), x.stride(0), width
        counted = sizes.max_rows, slot_bytes, self._sum_counts.ctypes.data, self._base.ctypes.data
        team.run(self._kernels.publish, rows, *of_rows, slots + self.rank * rank_bytes, *counted)
        team.run(self._kernels.collect, rows, *of_rows, slots, *counted, rank_bytes, self.size, *self._waiting)
        return x

    def gather(self, part: Tensor, width: int) -> Tensor:
        """See `Ranks.gather`."""
        sizes, (rows, columns) = self.sizes, part.shape
        assert rows <= sizes.max_rows, (rows, sizes.max_rows)
        assert width <= sizes.vocab, (width, sizes.vocab)
        assert columns == len(part_of(self.rank, self.size, width)), (columns, width)
        self._check_rows(part)
        slot_bytes, team = sizes.gather_slot_bytes, the_team()
        slots, rank_bytes = self._start + sizes.gathers_at, sizes.max_rows * slot_bytes
        counted = slot_bytes, self._gather_counts.ctypes.data, self._base.ctypes.data
        of_part = part.data_ptr(), part.stride(0)
        if self.rank:
            own = slots + self.rank * rank_bytes
            team.run(self._kernels.send, rows, *of_part, columns, own, *counted, *self._waiting)
            return part
        out = team.empty(rows, width, part.dtype)
        of_out = out.data_ptr(), out.stride(0), width
        team.run(self._kernels.receive, rows, *of_part, *of_out, slots, *counted, rank_bytes, self.size, *self._waiting)
        return out

    def begin_step(self, number: int) -> None:
        """See `Ranks.begin_step`. It does not wait: the first sum of the step does."""
        assert number << _STEP_SHIFT >= self._base[0], "steps have increasing numbers"
        self._base[0] = number << _STEP_SHIFT

    def end_step(self) -> None:
        """See `Ranks.end_step`."""
        self.check()

    def abort(self) -> None:
        """See `Ranks.abort`."""
        if self._abort_word[0] == AbortWord.GOES_ON:
            self._abort_word[0] = AbortWord.ABORTED

    def check(self) -> None:
        """See `Ranks.check`."""
        match self._abort_word[0]:
            case AbortWord.ABORTED:
                raise RankLostError("a rank of this model has ended")
            case AbortWord.OUT_OF_STEP:
                raise RankLostError("the ranks of this model do not compute the same step")

    @property
    def waited_s(self) -> float:
        """See `Ranks.waited_s`: of the thread that has waited most, 0 in the first second."""
        if not self._cycles_per_s:
            (began, at_first), now = self._began, time.monotonic()
            if now - began < _LEAST_S:
                return 0.0
            self._cycles_per_s = (self._cycles() - at_first) / (now - began)
        return int(self._waits[:, 0].max()) / self._cycles_per_s

    def _cycles(self) -> int:
        now = np.zeros(1, dtype=np.int64)
        the_team().run(self._kernels.read_cycles, 1, now.ctypes.data)
        return int(now[0])

    @property
    def _waiting(self) -> tuple[int, int, int]:
        return self._abort, SCHED_YIELD, self._waits.ctypes.data

    def _check_rows(self, x: Tensor) -> None:
        assert str(x.dtype) == f"torch.{self.sizes.dtype}", (x.dtype, self.sizes.dtype)
        assert x.shape[1] == 1 or x.stride(1) == 1, "the elements of a row are contiguous"


class _Kernels(NamedTuple):
    publish: Kernel
    collect: Kernel
    send: Kernel
    receive: Kernel
    read_cycles: Kernel


@cache
def _kernels(dtype: str) -> _Kernels:
    return _Kernels(
        rank_sums.make_publish(dtype),
        rank_sums.make_collect(dtype),
        rank_sums.make_send(dtype),
        rank_sums.make_receive(dtype),
        rank_sums.make_read_cycles(),
    )


def _in_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
