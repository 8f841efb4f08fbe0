"""A decoder's small operations, with an adjustment of threads to this worker's share of the cores before each."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from services.engine.kernels.base import HostOperations, Rows
from services.engine.runner.cpu.cores import StepCores

T = TypeVar("T")


class SharedCoreOperations:
    """`Operations` that adapt the number of threads to other workers' steps, while prompts are computed.

    A recorded step runs all its kernels in one call and adapts to nothing.

    Where rows are computed in blocks, the threads are adjusted once, before the first block; the blocks of 2,048 tokens
    are some 10 ms of work. If other workers begin steps meanwhile, threads in excess share the cores with theirs for
    that time, and take blocks when they run. Elsewhere, the threads are adjusted before each operation, and no more
    than some matrix products lie between two operations.
    """

    def __init__(self, operations: HostOperations, cores: StepCores) -> None:
        self._operations = operations
        self._cores = cores

    def replay(self, key: Hashable, inputs: Sequence[Tensor], body: Callable[[], T]) -> T:
        """Does `Operations.replay`; but a step of prompts beside another worker's runs kernel by kernel, and adapts.

        A step that began alone keeps its threads to its end.
        """
        return body() if self._cores.shares_prompts() else self._operations.replay(key, inputs, body)

    def by_rows(self, num_rows: int, row_bytes: int, body: Callable[[], Rows]) -> Rows:
        """See `Operations.by_rows`."""
        self._cores.adjust_for_prompts()
        return self._operations.by_rows(num_rows, row_bytes, body)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.norm`."""
        self._cores.adjust_for_prompts()
        return self._operations.norm(x, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """See `Operations.add_norm`."""
        self._cores.adjust_for_prompts()
        return self._operations.add_norm(x, y, weight, eps, factor)

    def add_normed(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.add_normed`."""
        self._cores.adjust_for_prompts()
        self._operations.add_normed(x, y, weight, eps)

    def norm_in_place(self, y: Tensor, weight: Tensor, eps: float) -> None:
        """See `Operations.norm_in_place`."""
        self._cores.adjust_for_prompts()
        self._operations.norm_in_place(y, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
        """See `Operations.rotate`."""
        self._cores.adjust_for_prompts()
        self._operations.rotate(heads, cos, signed_sin, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.silu_mul`."""
        self._cores.adjust_for_prompts()
        return self._operations.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.gelu_mul`."""
        self._cores.adjust_for_prompts()
        return self._operations.gelu_mul(gate_up)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See `HostOperations.mask`."""
        self._operations.mask(logits, rows, bits)
