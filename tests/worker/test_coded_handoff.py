"""Workers with KV in codes of one byte, over real transports: a block that moved gives what it gave before."""

from pathlib import Path

import pytest

from services.config import KvCacheDtype, TransportName, WorkerRole
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.worker.transports import make_transports
from services.worker.worker import Worker, WorkerParts
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import prompts_of
from tests.engine.stepping import run_greedy
from tests.engine.test_torch_runner import OF_KERNELS, load
from tests.worker.client import TestGateway
from tests.worker.conftest import serving, worker_baseline


def make_worker(role: WorkerRole, directory: Path, kind: KvCacheDtype, transport: TransportName) -> Worker:
    """A worker with a pool of its own, all of whose bytes are those of NaN before they are written."""
    runner = load(directory, block_size=16, kv_cache_dtype=kind, kv_memory_bytes=1 << 19)
    runner.kv_memory().array[:] = 0xFF
    prefill, decode = PrefillScheduler(24), DecodeScheduler(32, prefill_chunk=16)
    return Worker(
        WorkerParts(
            role=role,
            runner=runner,
            scheduler=prefill if role is WorkerRole.PREFILL else decode,
            make_transports=make_transports(transport),
            fingerprint="one model",
            eos_token_ids=(),
            max_model_len=160,
            max_num_seqs=8,
        )
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        (KvCacheDtype.INT8, TransportName.NIXL),
        (KvCacheDtype.FP8, TransportName.GRPC),
        (KvCacheDtype.INT8, TransportName.GRPC),
        (KvCacheDtype.FP8, TransportName.NIXL),
    ],
)
async def test_tokens_after_a_handoff_are_those_of_one_worker(
    kind: KvCacheDtype, transport: TransportName, tmp_path: Path
) -> None:
    """In bfloat16: a second turn too, of which both workers hold a part. Half of the bytes move, and the scales."""
    directory = write_checkpoint(tmp_path / "model", **OF_KERNELS)
    alone, gateway, prompt = load(directory, kv_cache_dtype=kind), TestGateway(), prompts_of([53])[0]
    token_bytes, plain = alone.layout.token_bytes, load(directory).layout
    head_dim = plain.head_dim
    assert token_bytes * 2 * head_dim == plain.token_bytes * (head_dim + 4)
    workers = [make_worker(role, directory, kind, transport) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)]
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        first = await gateway.hand_off(prefill, decode, prompt, 20)
        await decode.until(lambda: decode.ended(first))
        assert decode.tokens(first) == run_greedy(alone, [prompt], 20, 16)[0].generated
        moved = decode.load.bytes_moved
        assert moved == 4 * 16 * token_bytes
        turn = [*prompt, *decode.tokens(first), 5, 6, 7]
        second = await gateway.hand_off(prefill, decode, turn, 20)
        await decode.until(lambda: decode.ended(second))
        # KV of tokens that were decoded is rounded otherwise than where they are a prompt, so later tokens may differ.
        assert decode.tokens(second)[:12] == run_greedy(alone, [turn], 12, 16)[0].generated
        assert decode.rows[second][0].cached == 64
        assert decode.load.bytes_moved == moved + 16 * token_bytes
        for worker in workers:
            await worker_baseline(worker)
