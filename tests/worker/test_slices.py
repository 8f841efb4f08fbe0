"""Handoffs of models whose layers have different windows: what moves is what the consumer's first token sees."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from kvtransfer.layer_groups import LayerGroups
from kvtransfer.transports.base import Transport
from kvtransfer.transports.byte_stream import BlockSource, ByteStreamTransport, Dial
from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.runner.simulated import SimulatedRunner
from services.worker.worker import MakeTransports
from tests.engine.harness import reference
from tests.worker.client import TestGateway
from tests.worker.conftest import BLOCK_SIZE, CountingRunner, Pair, make_worker, serving

WINDOW = 9
GROUPS = LayerGroups((None, WINDOW), (((0,),), ((1,), (2,))))
SLICE_BYTES = SimulatedRunner(GROUPS.num_slices, BLOCK_SIZE, groups=GROUPS).layout.block_bytes


class SlicedRunner(CountingRunner):
    """A model of three slices, two of which have a window."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks * GROUPS.num_slices, block_size, groups=GROUPS)


def over_grpc(source: BlockSource, dial: Dial) -> list[Transport]:
    return [ByteStreamTransport(source, dial)]


@contextlib.asynccontextmanager
async def sliced_pair(transports: MakeTransports | None) -> AsyncIterator[Pair]:
    fabric = MemoryFabric()
    roles = WorkerRole.PREFILL, WorkerRole.DECODE
    workers = [make_worker(role, fabric, runner=SlicedRunner, transports=transports) for role in roles]
    gateway = TestGateway()
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        yield Pair(gateway, prefill, decode, fabric, workers)


def moved_bytes(length: int, num_cached: int = 0) -> int:
    """Of a prompt of so many tokens, of which the consumer has so many blocks."""
    num_blocks, unseen = -(-length // BLOCK_SIZE), (length - WINDOW + 1) // BLOCK_SIZE
    return (num_blocks - num_cached + 2 * (num_blocks - max(unseen, num_cached))) * SLICE_BYTES


@pytest.mark.parametrize("transports", [None, over_grpc])
async def test_what_no_token_will_see_is_not_moved(transports: MakeTransports | None) -> None:
    """Nor a prefix that the consumer has; and choices move their prompt once."""
    async with sliced_pair(transports) as pair:
        prompt = list(range(30, 133))
        first = await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 12)
        await pair.decode.until(lambda: pair.decode.ended(first))
        assert pair.decode.tokens(first) == reference(prompt, 12, groups=GROUPS)
        assert pair.decode.load.bytes_moved == moved_bytes(103) < 103 // BLOCK_SIZE * 2 * SLICE_BYTES

        turn = prompt + pair.decode.tokens(first) + list(range(500, 533))
        moved, held = moved_bytes(103), (103 + 12 - 1) // BLOCK_SIZE
        second = await pair.gateway.hand_off(pair.prefill, pair.decode, turn, 3)
        await pair.decode.until(lambda: pair.decode.ended(second))
        assert pair.decode.rows[second][0].cached == held * BLOCK_SIZE
        assert pair.decode.tokens(second) == reference(turn, 3, groups=GROUPS)
        assert pair.decode.load.bytes_moved == moved + moved_bytes(len(turn), held)

        moved, other = pair.decode.load.bytes_moved, list(range(300, 350))
        handle = await pair.gateway.hand_off(pair.prefill, pair.decode, other, 9, seeds=(3, 1, 4), temperature=1.0)
        await pair.decode.until(lambda: all(map(pair.decode.ended, range(handle + 1, handle + 4))))
        for choice, seed in enumerate((3, 1, 4), 1):
            expected = reference(other, 9, groups=GROUPS, seed=seed, temperature=1.0)
            assert pair.decode.tokens(handle + choice) == expected
        assert pair.decode.load.bytes_moved == moved + moved_bytes(50)
        await pair.baseline()


async def test_workers_count_whole_blocks_for_gateways() -> None:
    async with sliced_pair(None) as pair:
        await pair.decode.until(lambda: pair.decode.hello is not None and pair.decode.load.available_blocks > 0)
        assert pair.decode.hello is not None
        assert pair.decode.hello.num_blocks == 2000 == pair.decode.load.available_blocks
        assert pair.decode.hello.kv_token_bytes * BLOCK_SIZE == GROUPS.num_slices * SLICE_BYTES


async def test_prompts_together_over_one_cold_prefix_move_it_once() -> None:
    """Each sees no more of it than the last blocks, as all of them are of one length."""
    async with sliced_pair(None) as pair:
        prefix = list(range(100, 180))
        prompts = [[*prefix, 300 + index] for index in range(16)]
        handles = [await pair.gateway.hand_off(pair.prefill, pair.decode, prompt, 4) for prompt in prompts]
        await pair.decode.until(lambda: all(pair.decode.ended(handle) for handle in handles))
        for handle, prompt in zip(handles, prompts, strict=True):
            assert pair.decode.tokens(handle) == reference(prompt, 4, groups=GROUPS)
        assert sorted(pair.decode.rows[handle][0].cached for handle in handles) == [0] + [80] * 15
        await pair.baseline()
