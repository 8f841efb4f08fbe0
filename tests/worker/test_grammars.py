"""A worker ends while requests wait for grammars."""

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.sampling.guidance import Guidance
from services.worker.worker import Worker
from tests.worker.client import TestGateway
from tests.worker.conftest import CountingRunner, make_worker, serving

NUM_GRAMMARS = 40
VOCAB = 262  # bytes, and a few more
# Each takes some 0.5 s; what is left of 40 is long.
ENDS_WITH_GRAMMARS = f"""
from llguidance import LLMatcher
from services.engine.sampling.guidance import Guidance
guidance = Guidance("byte", 262, (261,))
guidance.grammars.on_compiled = lambda: None
for count in range({NUM_GRAMMARS}):
    guidance.grammars.ask(LLMatcher.grammar_from_regex("((a{{100}}){{100}}){{%d}}" % (20 + count)), (1, ""))
guidance.grammars.close(0)
print(len(guidance.grammars._kept))
import atexit
atexit.register(lambda: print(len(guidance.grammars._kept)))
"""


class Bytes(CountingRunner):
    """A model of bytes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=VOCAB)


class Held(Guidance):
    """Compiles when it is let."""

    def __init__(self) -> None:
        super().__init__("byte", VOCAB, (VOCAB - 1,))
        self.let, self.begun = threading.Semaphore(0), 0

    def _compile(self, grammar: str) -> LLMatcher:
        self.begun += 1
        self.let.acquire()
        return super()._compile(grammar)

    async def let_at_the_end(self) -> None:
        """Lets all go on once the worker ends."""
        while not self.grammars.closed:
            await asyncio.sleep(0.01)
        self.let.release(NUM_GRAMMARS)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_worker_ends_with_grammars_in_its_queue(goes_on: bool):
    """Those that are being compiled come to their end, or are left where they are: the process ends then."""
    guidance, parts = Held(), make_worker(WorkerRole.DECODE, MemoryFabric(), runner=Bytes)._parts
    worker, gateway = Worker(replace(parts, guidance=guidance)), TestGateway()
    try:
        async with serving(worker) as (port,), gateway.connect(port) as stream:
            for count in range(NUM_GRAMMARS):
                grammar = LLMatcher.grammar_from_regex(f"[0-9]{{{3 + count}}}")
                await stream.send(gateway.submit([1, 2, 3], 100, grammar=grammar))
            await stream.send(last := gateway.submit([1, 2, 3], 5))
            await stream.until(lambda: stream.ended(last.handle))
            letting = None if goes_on else asyncio.create_task(guidance.let_at_the_end())
        assert worker.threads_ended is not goes_on
        assert guidance.begun == 2
    finally:
        guidance.let.release(NUM_GRAMMARS)
    assert await asyncio.to_thread(guidance.grammars.close, 30)
    assert letting is None or letting.done()


def test_the_process_does_not_compile_what_was_queued_before_it_ends():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_GRAMMARS],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert all(int(count) <= 2 for count in ended.stdout.split()), ended.stdout
