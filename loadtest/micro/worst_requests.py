"""Requests that ask a gateway for the most work at once, within its limits and beyond, and a client that sends them."""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import orjson

from loadtest.compare.servers import MODEL_NAME
from protos import inference_pb2

_TIMEOUT_S = 120.0
_MIB = 1 << 20
_PIECE = 1 << 18
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_MAX_BODY = 8 * _MIB - 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request. answer: the status, or how the connection ended without one."""

    answer: str
    seconds: float


def send(name: str, port: int, grpc_port: int) -> Outcome:
    """Sends the request of this name to a gateway on loopback, and waits for the whole answer."""
    parts = None if name in _GRPC else list(_HTTP[name]())
    message = _GRPC[name]() if name in _GRPC else b""
    start = time.perf_counter()
    answer = _call(grpc_port, message) if parts is None else _exchange(port, parts)
    return Outcome(answer, time.perf_counter() - start)


def _exchange(port: int, parts: list[bytes]) -> str:
    """Writes all that it can before it reads, as most clients do."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n") and (more := connection.recv(_PIECE)):
                answer += more
        except OSError as error:
            return f"no answer: {type(error).__name__}"
    return answer.split(b"\r\n", 1)[0].decode().removeprefix("HTTP/1.1 ") or "no answer"


def _call(port: int, message: bytes) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = channel.unary_stream(
            "/baton.v1.Inference/Generate",
            request_serializer=bytes,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        try:
            for _ in stub(message, timeout=_TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _post(path: str, body: bytes) -> Iterator[bytes]:
    yield (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    yield body


def _completion(**fields: object) -> Iterator[bytes]:
    return _post(_COMPLETIONS, orjson.dumps({"model": MODEL_NAME, "max_tokens": 1, "prompt": "x", **fields}))


def _chat(count: int, **fields: object) -> Iterator[bytes]:
    messages = [{"role": "user", "content": "word"}] * count
    return _post(_CHAT, orjson.dumps({"model": MODEL_NAME, "max_tokens": 1, "messages": messages, **fields}))


def _filled(before: bytes, piece: bytes, after: bytes) -> Iterator[bytes]:
    """A completion with as many equal pieces as a body may have."""
    head = b'{"model":"' + MODEL_NAME.encode() + b'",' + before
    return _post(_COMPLETIONS, head + piece * ((_MAX_BODY - len(head) - len(after)) // len(piece)) + after)


def _large_header() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: "
    for _ in range(100):
        yield b"a" * _MIB
    yield b"\r\n\r\n"


def _many_keys() -> Iterator[bytes]:
    keys = b",".join(b'"%d":1' % number for number in range(700_000))
    return _post(_COMPLETIONS, b'{"model":"x",' + keys + b"}")


_HTTP: dict[str, Callable[[], Iterator[bytes]]] = {
    "header of 100 MB": _large_header,
    "16,000 headers": lambda: iter(
        [b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"a:\r\n" * 16_000, b"\r\n"]
    ),
    "body of 100 MB": lambda: _post(_COMPLETIONS, b"x" * (100 * _MIB)),
    "echo of 2,600,000 ids": lambda: _completion(prompt=[7] * 2_600_000, echo=True),
    "echo of 8,000 ids": lambda: _completion(prompt=[7] * 8000, echo=True, n=16),
    "1,024 prompts of 1,000 ids": lambda: _completion(prompt=[[7] * 1000] * 1024),
    "1,024 texts of 8,000 characters": lambda: _completion(prompt=["word " * 1600] * 1024),
    "128 choices, 1,000 biases": lambda: _completion(n=128, logit_bias={str(token): 1 for token in range(1000)}),
    "1,024 choices": lambda: _completion(prompt=["x"] * 8, n=128),
    "text of 8 MB": lambda: _filled(b'"prompt":"', b"word ", b'"}'),
    "text of escapes": lambda: _filled(b'"prompt":"', rb"\u00e9", b'"}'),
    "128 bad words": lambda: _completion(bad_words=["word " * 12] * 128),
    "128 long bad words": lambda: _completion(bad_words=["word " * 200] * 128),
    "16,384 messages": lambda: _chat(16_384),
    "2,048 messages": lambda: _chat(2048),
    "content in 200,000 parts": lambda: _post(
        _CHAT,
        orjson.dumps(
            {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}],
            }
        ),
    ),
    "16,384 wrong messages": lambda: _post(_CHAT, orjson.dumps({"model": MODEL_NAME, "messages": [5] * 16_384})),
    "2,800,000 objects": lambda: _filled(b'"prompt":[', b"{},", b"1]}"),
    "700,000 fields": _many_keys,
    "8 MB of broken JSON": lambda: _filled(b'"prompt":[', b"[1],", b"}"),
}


def _generate(**fields: object) -> bytes:
    return inference_pb2.GenerateRequest(max_tokens=1, **fields).SerializeToString()  # type: ignore[arg-type]


_GRPC: dict[str, Callable[[], bytes]] = {
    "gRPC: 2,600,000 ids": lambda: _generate(token_ids={"ids": [7] * 2_600_000}),
    "gRPC: 100,000 messages": lambda: _generate(chat={"messages": [{"role": "user", "content": "word"}] * 100_000}),
    "gRPC: 4,000,000 empty messages": lambda: _generate(chat=inference_pb2.Chat.FromString(b"\x0a\x00" * 4_000_000)),
}

NAMES = (*_HTTP, *_GRPC)
