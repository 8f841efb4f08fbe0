"""Keys over gRPC: asked for by every method of every service but health."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import inference_pb2, inference_pb2_grpc
from services.config import Right
from services.gateway.keys.changes import add_key
from services.gateway.keys.file import read_keys
from services.gateway.keys.key_entry import RateLimits
from tests.gateway.keys.key_files import KeySet, write_keys
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode
HELLO = inference_pb2.GenerateRequest(text="Hi", max_tokens=5)


@pytest.fixture(scope="module")
def key_set(tmp_path_factory: pytest.TempPathFactory) -> KeySet:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(key_set: KeySet) -> AsyncIterator[Api]:
    async with running_api(keys=key_set.keys()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(api: Api) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start_grpc()}") as opened:
        yield opened


def methods() -> list[tuple[str, bool, bool]]:
    """Each method of the services that ask for a key: its path, and whether either side streams."""
    services: list[Any] = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    return [
        (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for service in services
        for method in service.methods
    ]


async def code_of(channel: grpc.aio.Channel, path: str, streams: tuple[bool, bool], metadata: Any) -> Code:
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    call = kinds[streams](path)(iter([b""]) if streams[0] else b"", metadata=metadata, timeout=60)
    code: Code = await call.code()
    return code


async def test_every_method_refuses_who_has_no_key_or_a_wrong_one(channel: grpc.aio.Channel):
    found = methods()
    assert len(found) >= 5
    for path, *streams in [*found, ("/baton.v1.Inference/Nothing", False, False), ("/no.Service/Call", False, False)]:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "wrong"),)):
            assert await code_of(channel, path, (streams[0], streams[1]), metadata) is Code.UNAUTHENTICATED, path


async def test_health_is_open(channel: grpc.aio.Channel):
    check: Any = channel.unary_unary(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest.SerializeToString, lambda data: data
    )
    await check(health_pb2.HealthCheckRequest(), timeout=60)


async def test_either_name_in_the_metadata_brings_a_key(api: Api, key_set: KeySet, channel: grpc.aio.Channel):
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    for metadata in ((("authorization", f"Bearer {key_set.acme}"),), (("x-api-key", key_set.other),)):
        assert [answer.text async for answer in stub.Generate(HELLO, metadata=metadata, timeout=60)]
    acme, other = api.generator.requests[-2:]
    assert (acme.tenant, other.tenant) == ("acme", "other")
    assert "" != acme.capsules[0].cache_salt != other.capsules[0].cache_salt != ""


async def test_embeddings_over_grpc_have_the_tenant_s_salt(api: Api, key_set: KeySet, channel: grpc.aio.Channel):
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    api.generator.script.as_asked = True
    request = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="Hi")])
    await stub.Embed(request, metadata=(("x-api-key", key_set.acme),), timeout=60)
    api.generator.script.as_asked = False
    assert api.generator.requests[-1].tenant == "acme"
    assert api.generator.requests[-1].capsules[0].cache_salt


async def test_a_key_without_the_right_is_denied(key_set: KeySet, channel: grpc.aio.Channel):
    metadata = (("x-api-key", key_set.operator),)
    assert await code_of(channel, "/baton.v1.Inference/ListModels", (False, False), metadata) is Code.PERMISSION_DENIED


async def test_a_stranger_s_message_is_not_waited_for(channel: grpc.aio.Channel):
    call: Any = channel.stream_stream("/baton.v1.Inference/Generate")()
    assert await call.code() is Code.UNAUTHENTICATED


async def test_a_key_that_is_revoked_opens_nothing_from_then_on(key_set: KeySet):
    keys = key_set.keys()
    async with running_api(keys=keys) as api:
        _, key = add_key(key_set.path, "late", [Right.API], 0, RateLimits())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start_grpc()}") as channel:
            metadata = (("x-api-key", key),)
            path = "/baton.v1.Inference/ListModels"
            assert await code_of(channel, path, (False, False), metadata) is Code.UNAUTHENTICATED
            keys.use(read_keys(key_set.path))
            assert await code_of(channel, path, (False, False), metadata) is Code.OK
