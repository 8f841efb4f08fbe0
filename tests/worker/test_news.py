"""What a worker says that it can do: in its hello, and afterwards."""

import asyncio
from dataclasses import replace
from typing import cast

from kvtransfer.transports.memory import MemoryFabric
from services.config import HandoffMode, WorkerRole
from services.engine.sampling.guidance import Guidance
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.router import Policy
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.capabilities import CACHE_SALT, CAPABILITIES, EMBEDDINGS, GRAMMAR, OF_EVERY_WORKER, TOKEN_TYPES
from services.protocol.messages import WorkerNews
from services.protocol.versions import Since
from services.worker.worker import Worker
from tests.gateway.dispatch_stack import Counts, eventually, read_all, request
from tests.worker.client import TestGateway
from tests.worker.conftest import make_worker, serving
from tests.worker.test_grammars import VOCAB, Bytes

WITHOUT_SALTS = WorkerNews(OF_EVERY_WORKER - {CACHE_SALT})
WITH_SALTS = WorkerNews(OF_EVERY_WORKER)


def guiding(role: WorkerRole) -> Worker:
    parts = make_worker(role, MemoryFabric(), runner=Bytes)._parts
    cast(Bytes, parts.runner).token_types = True
    return Worker(replace(parts, guidance=Guidance("byte", VOCAB, (VOCAB - 1,))))


async def test_a_worker_with_all_parts_knows_all_that_a_request_can_need():
    """Else a request could need what no worker ever knows."""
    gateway, prefill, decode = TestGateway(), guiding(WorkerRole.PREFILL), guiding(WorkerRole.DECODE)
    async with (
        serving(prefill, decode) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as to_prefill,
        gateway.connect(decode_port) as to_decode,
    ):
        assert to_prefill.hello is not None
        assert to_decode.hello is not None
        assert to_prefill.hello.knows == {each.name for each in CAPABILITIES}
        assert to_decode.hello.knows == to_prefill.hello.knows - {EMBEDDINGS, TOKEN_TYPES}
    plain = make_worker(WorkerRole.DECODE, MemoryFabric())
    async with serving(plain) as (port,), gateway.connect(port) as stream:
        assert stream.hello is not None
        assert stream.hello.knows == OF_EVERY_WORKER
        assert GRAMMAR not in stream.hello.knows


async def test_news_go_to_gateways_that_understand_them_and_to_later_ones_by_the_hello():
    worker = make_worker(WorkerRole.DECODE, MemoryFabric())
    today, older = TestGateway(1), TestGateway(2, minor=Since.NEWS - 1)
    async with serving(worker) as (port,), today.connect(port) as stream, older.connect(port) as older_stream:
        worker.tell_gateways(WITHOUT_SALTS)
        await stream.until(lambda: stream.told)
        assert stream.told == [WITHOUT_SALTS]
        submit = older.submit([1, 2, 3], 4)
        await older_stream.send(submit)
        await older_stream.until(lambda: older_stream.ended(submit.handle))
        assert older_stream.told == []
        async with TestGateway(3).connect(port) as later:
            assert later.hello is not None
            assert later.hello.knows == WITHOUT_SALTS.knows


async def test_a_request_that_waited_is_served_by_a_worker_after_its_news():
    """By a worker's real streams and engine, and a gateway's dispatch side."""
    worker = make_worker(WorkerRole.DECODE, MemoryFabric())
    async with serving(worker) as (port,):
        worker.tell_gateways(WITHOUT_SALTS)
        addresses = [f"127.0.0.1:{port}", "127.0.0.1:1"]  # at the second one, a worker may start that knows salts
        policy, access = Policy(HandoffMode.NEVER), WorkerAccess(no_worker_wait_s=3600)
        dispatcher = Dispatcher(addresses, policy, 9, MemoryPrefixIndex(), Counts(), access)
        task = asyncio.create_task(dispatcher.run())
        plain = request(max_tokens=5)
        wanted = replace(plain, capsules=(replace(plain.capsules[0], cache_salt="s"),))

        async def answer() -> list[int]:
            async with dispatcher.generate(wanted) as generation:
                tokens, _ = await read_all(generation)
                return tokens

        await eventually(lambda: dispatcher.max_model_len is not None)
        waiting = asyncio.create_task(answer())
        await eventually(lambda: [row["phase"] for row in dispatcher.describe()["rows"]] == ["waiting"])  # type: ignore[attr-defined]
        worker.tell_gateways(WITH_SALTS)
        assert len(await waiting) == 5
        task.cancel()
        await asyncio.wait([task])
