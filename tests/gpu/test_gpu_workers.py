"""A prefill and a decode worker, each with a model and a pool on one device, and what passes between them."""

from pathlib import Path

import pytest

from services.config import TransportName, WorkerRole
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.worker.transports import make_transports
from services.worker.worker import Worker, WorkerParts
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.gpu.test_gpu_runner import make_runner
from tests.worker.client import TestGateway
from tests.worker.conftest import serving, worker_baseline


def make_worker(role: WorkerRole, directory: Path) -> Worker:
    """Its engine is a step ahead of what it knows. Blocks travel as bytes, from device memory to device memory."""
    prefill, decode = PrefillScheduler(16), DecodeScheduler(32, prefill_chunk=16)
    return Worker(
        WorkerParts(
            role=role,
            runner=make_runner(directory, num_blocks=24, block_size=8),
            scheduler=prefill if role is WorkerRole.PREFILL else decode,
            make_transports=make_transports(TransportName.GRPC),
            fingerprint="one model",
            eos_token_ids=(),
            max_model_len=44,  # of which the self-check computes all, slowly in the interpreter
            max_num_seqs=4,
            pipeline_depth=1,
        )
    )


@pytest.mark.long
async def test_a_request_is_handed_from_one_pool_on_a_device_to_another(tmp_path: Path) -> None:
    """All tokens are those of `transformers`, and those of a second turn, of which both sides hold a part.

    One request at a time: Triton's interpreter serves one thread.
    """
    directory = write_checkpoint(tmp_path / "model")
    prompt, reference, gateway = prompts_of([27])[0], Reference(directory), TestGateway()
    workers = [make_worker(role, directory) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)]
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        first = await gateway.hand_off(prefill, decode, prompt, 6)
        await decode.until(lambda: decode.ended(first))
        assert decode.tokens(first) == reference.tokens(prompt, 6)
        assert prefill.tokens(first) == decode.tokens(first)[:1]
        moved = decode.load.bytes_moved
        assert moved == 4 * workers[0]._parts.runner.layout.block_bytes

        turn = [*prompt, *decode.tokens(first), 5, 6, 7]
        second = await gateway.hand_off(prefill, decode, turn, 4)
        await decode.until(lambda: decode.ended(second))
        assert decode.tokens(second) == reference.tokens(turn, 4)
        assert (prefill.rows[second][0].cached, decode.rows[second][0].cached) == (24, 32)
        assert decode.load.bytes_moved == moved + workers[0]._parts.runner.layout.block_bytes
        for worker in workers:
            await worker_baseline(worker)
