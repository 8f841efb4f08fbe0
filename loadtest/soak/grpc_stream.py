"""Streams of the soak's requests over baton.v1.Inference."""

import asyncio
import time
from collections.abc import Mapping

import grpc

from loadtest.http_stream import Address, HttpError, NoConnection
from loadtest.soak.answers import Reading
from loadtest.soak.cases import Case
from protos import inference_pb2, inference_pb2_grpc

_CONNECT_S = 10.0  # a gateway is frozen for less
_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
_OWN_WORDS = "x-request-id"  # metadata that everything the gateway itself says ends with


async def ask(address: Address, case: Case, n: int, reading: Reading, rest_s: float) -> None:
    """Reads a stream to its end into `reading`, texts alone. Raises HttpError where it broke off, NoConnection.

    rest_s: a slow reader's pause after each response, in seconds.
    """
    async with grpc.aio.insecure_channel(f"{address.host}:{address.port}") as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _CONNECT_S)
        except TimeoutError as error:
            raise NoConnection(f"{address.host}:{address.port}: no gRPC connection") from error
        try:
            async for response in inference_pb2_grpc.InferenceStub(channel).Generate(_request(case, n)):
                _add(reading, response)
                if rest_s:
                    await asyncio.sleep(rest_s)
        except grpc.aio.AioRpcError as error:
            _ended(reading, error)
        else:
            reading.whole = True


def _request(case: Case, n: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=case.prompt),
        max_tokens=len(case.tokens),
        temperature=0,
        ignore_eos=True,
        n=n,
    )


def _add(reading: Reading, response: inference_pb2.GenerateResponse) -> None:
    reading.times_s.append(time.perf_counter())
    choice = reading.choices[response.choice]
    choice.text += response.text
    choice.finish_reason = _FINISH_REASONS[response.finish_reason] or choice.finish_reason


def _ended(reading: Reading, error: grpc.aio.AioRpcError) -> None:
    """Takes the gateway's own words as the answer. Raises HttpError for those of the connection."""
    said: Mapping[str, object] = dict(error.trailing_metadata())
    details = error.details() or ""
    if _OWN_WORDS in said:
        reading.whole, reading.error = True, f"gRPC {error.code().name}: {details}"
    elif details.startswith("failed to connect"):
        raise NoConnection(details) from error
    else:
        raise HttpError(f"gRPC {error.code().name}: {details}") from error
