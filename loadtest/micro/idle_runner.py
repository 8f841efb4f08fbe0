"""A model's runner that computes nothing: what a step takes beside `step_s` is then Baton's own."""

import time

import numpy as np

from kvtransfer.block_memory import HostBlocks
from kvtransfer.layout import KvLayout
from services.engine.runner.base import StepInput, StepOutput

BLOCK_SIZE = 16
SMALLEST = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")


class IdleRunner:
    """A `Runner` whose steps take `step_s` and no core. Each row of a batch gets its own number as its token."""

    window: int | None = None
    spare_blocks = range(0)
    whole_prompts = False
    token_types = False
    generates = True
    has_experts = False
    experts_of_ranks: tuple[range, ...] = ()

    def __init__(
        self, num_blocks: int, step_s: float = 0.0, *, layout: KvLayout = SMALLEST, vocab_size: int = 1 << 30
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.embedding_size = 0
        self.step_s = step_s
        self._kv = HostBlocks(np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8))
        self._tokens = np.zeros(0, dtype=np.int32)

    def kv_memory(self) -> HostBlocks:
        """See `Runner.kv_memory`."""
        return self._kv

    def copy_block(self, source: int, destination: int) -> None:
        """See `Runner.copy_block`. Copies nothing: nobody reads the content."""

    def launch(self, step: StepInput) -> None:
        """See `Runner.launch`."""
        if len(self._tokens) != len(step.sampled):
            self._tokens = np.arange(len(step.sampled), dtype=np.int32)

    def collect(self) -> StepOutput:
        """See `Runner.collect`. Sleeps without the interpreter lock, as a model's operations run."""
        if self.step_s:
            time.sleep(self.step_s)
        return StepOutput(self._tokens, None)
