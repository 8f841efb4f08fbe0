"""The gateway that generated requests are sent to, and what every answer has to be."""

import http.client
import json
from collections import Counter
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from protos import inference_pb2, inference_pb2_grpc
from tests.fuzz_api.requests import GrpcCall, HttpRequest, grpc_calls, http_requests

CHECKED_EVERY = 1000  # requests

_SANE_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_NO_MESSAGE = "The bytes of this call are no message of its type."  # INTERNAL, as gRPC itself has it


class Target:
    """A running gateway.

    answers: how many there were of each status.
    """

    def __init__(self, port: int, grpc_port: int, model: str, slowest_s: float = 300.0) -> None:
        """slowest_s: a request that takes longer hangs."""
        self._slowest_s = slowest_s
        self.num_sent = 0
        self.answers: Counter[str] = Counter()
        self._model = model
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=self._slowest_s)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._methods: dict[str, Any] = {}

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def fields(self) -> dict[str, list[str]]:
        """By path that takes a body, the names of the fields that it may have, as /openapi.json says."""
        self._http.request("GET", "/openapi.json")
        document = json.loads(self._http.getresponse().read())
        found = {}
        for path, methods in document["paths"].items():
            if "requestBody" in methods.get("post", {}):
                schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
                refs = [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema])]
                schemas = document["components"]["schemas"]
                found[path] = sorted({name for ref in refs for name in schemas[ref]["properties"]})
        return found

    def send(self, request: HttpRequest) -> None:
        """Sends one request, and checks its answer."""
        headers = {"Content-Type": "application/json", **request.headers}
        chunked = "Transfer-Encoding" in headers
        body = iter([request.sent]) if chunked else request.sent
        self._http.request("POST", request.path, body, headers, encode_chunked=chunked)
        with self._http.getresponse() as response:
            answer = response.read()
        self._count(str(response.status))
        assert response.status < 500, (response.status, answer)
        assert b'data: {"error"' not in answer, answer
        if response.status != 200:
            body = json.loads(answer)
            of_cohere = request.path.startswith("/v2/") and request.path != "/v2/rerank"  # which answers as vLLM
            error = body if of_cohere else body["error"]
            if of_cohere:
                assert error.keys() == {"id", "message"}, error
            elif request.path.startswith("/v1/messages"):
                assert error.keys() - {"details"} == {"message", "type"}, error  # details: of a `thread`
            else:
                assert error.keys() == {"message", "type", "param", "code"}, error
            assert "Traceback" not in error["message"], error

    def call(self, call: GrpcCall) -> None:
        """Makes one call, and checks how it ends."""
        method = self._methods.get(call.method)
        if method is None:
            make = self._channel.unary_stream if call.streams else self._channel.unary_unary
            method = self._methods[call.method] = make(f"/baton.v1.Inference/{call.method}")
        code, words = grpc.StatusCode.OK, ""
        try:
            answers = method(call.body, timeout=self._slowest_s)
            for _ in answers if call.streams else [answers]:
                pass
        except grpc.RpcError as error:
            code, words = error.code(), error.details() or ""
        assert code in _SANE_CODES or words == _NO_MESSAGE, words
        self._count(code.name)

    def check_alive(self) -> None:
        """Answers of plain requests are what they always are."""
        self.send(HttpRequest("/v1/completions", b'{"prompt": "Hi", "max_tokens": 5}'))
        self._http.request("GET", "/ready")
        with self._http.getresponse() as response:
            assert response.status == 200
            response.read()
        plain = inference_pb2.GenerateRequest(model=self._model, text="Hi", max_tokens=5)
        assert [answer.finish_reason for answer in self._stub.Generate(plain, timeout=self._slowest_s)][-1] != 0

    def _count(self, status: str) -> None:
        self.answers[status] += 1
        self.num_sent += 1
        if self.num_sent % CHECKED_EVERY == 0:
            self.check_alive()


def fuzz(target: Target, num_requests: int, first_seed: int) -> None:
    """Sends so many requests, a quarter of them over gRPC. Raises AssertionError at the first fault."""
    http_only = http_requests(target.fields())

    @seed(first_seed)
    @settings(
        max_examples=num_requests,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.one_of(http_only, http_only, http_only, grpc_calls()))
    def send(request: HttpRequest | GrpcCall) -> None:
        if isinstance(request, GrpcCall):
            target.call(request)
        else:
            target.send(request)

    send()
    target.check_alive()
