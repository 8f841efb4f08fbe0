"""The runner of a group of ranks: rank 0, which has the others run each step that it runs.

    rank 0   send ─▶ step ··· sums ··· logits ─▶ sample ─▶ output
               │            │        │
    rank 1     └───▶ step ··· sums ··· its logits ─▶ wait for the next message

A step is complete when all ranks have ended it, since each has written KV of its own heads. Blocks of the pool are
those of the whole model, for whoever hands them over: their heads lie in the pools of the ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from kvtransfer.block_memory import BlockMemory
from kvtransfer.layout import KvLayout
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.base import SlowestRank, StepInput, StepOutput
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.group.links import GroupLinks
from services.engine.runner.group.messages import RankCopy, RankStep, pack_end
from services.engine.runner.group.slowest_rank import RankWaits


class GroupRunner:
    """`Runner` of a group. `launch` runs the whole step, and raises its errors; RankLostError if a rank is lost."""

    def __init__(
        self,
        own: TorchRunner,
        layout: KvLayout,
        blocks: BlockMemory,
        links: GroupLinks,
        experts_of_ranks: tuple[range, ...] = (),
    ) -> None:
        """own: rank 0's. layout: of the whole model's blocks. blocks: these, in the pools of all ranks, or where ranks
        are hosts, this one's part of them. experts_of_ranks: see `Runner.experts_of_ranks`.
        """
        self.layout = layout
        self.num_blocks, self.spare_blocks = own.num_blocks, own.spare_blocks
        self.vocab_size, self.embedding_size, self.generates = own.vocab_size, own.embedding_size, own.generates
        self.window, self.token_types, self.whole_prompts = own.window, own.token_types, own.whole_prompts
        self.has_experts, self.experts_of_ranks = own.has_experts, experts_of_ranks  # of stages, the last one's
        self._tell: Callable[[str], None] = _nobody
        self._own, self._blocks = own, blocks
        self._steps, self._ranks, self._others, self._cores = links.steps, links.ranks, links.others, links.cores
        self._numbers, self._closed = count(1), False
        self._waits = None if own.in_stages else RankWaits()
        links.others.watch(self._on_lost)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """See `RankGroup.when_lost`."""
        self._tell = tell
        if self._others.lost is not None:
            tell(self._others.lost)

    @property
    def slowest_rank(self) -> SlowestRank | None:
        """See `RankGroup.slowest_rank`."""
        return None if self._waits is None else self._waits.latest

    def kv_memory(self) -> BlockMemory:
        """See `Runner.kv_memory`."""
        return self._blocks

    def copy_block(self, source: int, destination: int) -> None:
        """See `Runner.copy_block`."""
        number = next(self._numbers)
        with self._step(number):
            self._steps.send(RankCopy(number, source, destination).pack())
            self._own.copy_block(source, destination)

    def launch(self, step: StepInput) -> None:
        """Runs the step on all ranks."""
        number = next(self._numbers)
        threads = self._cores.lead(prompts=step.tokens.computes_prompts)
        message = RankStep(number, threads, step.samples_all, step.parts, step.tokens)
        with self._step(number):
            self._steps.send(message.pack())
            self._own.launch(step)

    def collect(self) -> StepOutput:
        """Returns the output of the oldest step that was not collected."""
        return self._own.collect()

    def close(self) -> None:
        """See `RankGroup.close`."""
        if self._closed:
            return
        self._closed = True
        with suppress(RankLostError):  # one that is lost has ended
            self._steps.send(pack_end())
        self._others.close()

    @contextmanager
    def _step(self, number: int) -> Iterator[None]:
        """Begins a step of rank 0, and waits for its end on all ranks. Raises RankLostError."""
        began = time.monotonic()
        try:
            self._ranks.begin_step(number)
            yield
            self._ranks.end_step()
            self._steps.wait_done(self._ranks.check)
            if self._waits is not None and self._waits.add_step(time.monotonic() - began):
                self._waits.note([self._ranks.waited_s, *self._steps.waited_s()])
        finally:
            # Whatever else went wrong in a step after a rank was lost comes of that.
            self._check()

    def _check(self) -> None:
        try:
            self._ranks.check()
        except RankLostError as error:
            raise RankLostError(self._others.why_lost() or str(error)) from None

    def _on_lost(self, reason: str) -> None:
        self._ranks.abort()
        self._tell(reason)


def _nobody(reason: str) -> None:
    """Hears of a loss before there is a worker."""
