"""`Ranks` by torch.distributed's Gloo: where there are no kernels, and between hosts. It is slower than `SharedRanks`,
and what it does is not recorded.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.nn import functional

from services.engine.kernels.base import BlockSizes
from services.engine.kernels.ranks import RankLostError, part_of

T = TypeVar("T")
_LOOK_AGAIN_S = 50e-6  # a wait that Gloo does could not be ended


class GlooRanks:
    """`Ranks` by a process group of its own: torch's default group is not used, so a process may have several."""

    is_kernel = False
    blocks: BlockSizes | None = None

    def __init__(
        self, store: Store, name: str, rank: int, size: int, patience_s: float, host: str | None = None
    ) -> None:
        """Waits until all ranks are there. store: one that all of them see. name: of the group, in the store.

        patience_s: how long this and each later call waits for the other ranks. host: the address of this host at which
        the others reach it; None: the one that its name leads to, which may be loopback. Raises RankLostError.
        """
        self.rank, self.size = rank, size
        self._step = -1
        self._waited_s = 0.0
        self._lost: str | None = None
        self._group: ProcessGroupGloo | None = self._guarded(
            lambda: ProcessGroupGloo(PrefixStore(name, store), rank, size, _options(patience_s, host))
        )

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        parts = self._all(x.contiguous())
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part.to(torch.float32)
        return total.to(x.dtype)

    def gather(self, part: Tensor, width: int) -> Tensor:
        """See `Ranks.gather`."""
        columns = [len(part_of(rank, self.size, width)) for rank in range(self.size)]
        parts = self._all(functional.pad(part, (0, max(columns) - part.shape[1])))
        if self.rank:
            return part
        return torch.cat([one[:, :count] for one, count in zip(parts, columns, strict=True)], dim=1)

    def begin_step(self, number: int) -> None:
        """See `Ranks.begin_step`."""
        assert number >= self._step, "steps have increasing numbers"
        self._step = number

    def end_step(self) -> None:
        """See `Ranks.end_step`."""
        self.check()

    def abort(self) -> None:
        """See `Ranks.abort`. It closes this rank's connections, which the other ranks notice.

        Gloo waits in that for its threads, which may wait for a host that is cut off: so it is not waited for.
        """
        self._lost = self._lost or "a rank of this model has ended"
        threading.Thread(target=self._release, name="end of Gloo", daemon=True).start()

    def _release(self) -> None:
        self._group = None

    def check(self) -> None:
        """See `Ranks.check`."""
        if self._lost is not None:
            raise RankLostError(self._lost)

    @property
    def waited_s(self) -> float:
        """See `Ranks.waited_s`: of this rank's exchanges, the bytes' own time among it."""
        return self._waited_s

    def _all(self, x: Tensor) -> list[Tensor]:
        """Returns what each rank comes with."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._guarded(lambda: self._exchange(parts, x))
        return parts

    def _exchange(self, parts: list[Tensor], x: Tensor) -> None:
        group = self._group
        self.check()
        assert group is not None
        work = group.allgather([parts], [x])
        del group  # or its connections would stay open after `abort`
        began = time.monotonic()
        while not work.is_completed():
            self.check()
            time.sleep(_LOOK_AGAIN_S)
        work.wait()
        self._waited_s += time.monotonic() - began

    def _guarded(self, act: Callable[[], T]) -> T:
        """Returns what a call of torch returns. Raises RankLostError where it fails: Gloo has one kind of error."""
        try:
            return act()
        except RuntimeError as error:
            self._lost = self._lost or f"a rank of this model has ended, or is too slow: {str(error).splitlines()[0]}"
            raise RankLostError(self._lost) from error


def _options(patience_s: float, host: str | None) -> ProcessGroupGloo._Options:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=patience_s)
    make = ProcessGroupGloo.create_default_device if host is None else partial(ProcessGroupGloo.create_device, host)
    options._devices = [make()]
    return options
