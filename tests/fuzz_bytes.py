"""Bytes made by atheris (libFuzzer, guided by what code they reach) for everything that parses bytes of others.

Each parser either returns or raises the errors that it names; anything else ends the run and shows the bytes.

    python -m tests.fuzz_bytes request --runs 1000000 --seed 1

Targets: request, json, grammar, grpc, gateway_message, worker_message, gzip. `all` runs one after the other.
"""

import argparse
import gzip as zipped
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["services"]):
    from services.gateway.api.dialects.completions import CompletionRequest
    from services.gateway.api.errors import ApiError
    from services.gateway.api.grammars.structured_output import grammar_of
    from services.gateway.api.requests.chat import ChatRequest
    from services.gateway.api.requests.large_json import JsonError, read_large
    from services.gateway.api.requests.structured import StructuredOutputs
    from services.gateway.api.requests.validation import parse_request, validate_request
    from services.gateway.grpc_api.message_size import TooManyFields, check_size
    from services.gateway.grpc_api.requests import other_fields, prompt_fields
    from services.gateway.http.exchange import unzipped
    from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL
    from services.protocol.capsule import Capsule
    from services.protocol.messages import Abort, Commands, Submit, TakeFrom
    from services.protocol.wire.errors import WireError
    from services.protocol.wire.stream import (
        deserialize_worker_message,
        pack_worker_message,
        parse_gateway_message,
        serialize_gateway_message,
    )
    from services.worker.submit_check import what_is_wrong

import numpy as np
import orjson
from google.protobuf.message import DecodeError

from kvtransfer.ids import WorkerId
from protos import inference_pb2, worker_pb2
from tests.protocol.test_wire import HELLO, SAMPLING, a_frame

_KINDS = ("regex", "grammar", "json")


def _refused(error: ApiError) -> None:
    assert 400 <= error.status < 500, error
    assert error.envelope()


def request(data: bytes) -> None:
    """A body of either endpoint."""
    for kind, neutral in ((ChatRequest, CHAT_NEUTRAL), (CompletionRequest, COMPLETIONS_NEUTRAL)):
        try:
            parsed = parse_request(data, kind, neutral)
            parsed.check_combinations()
            list(parsed.unknown_fields())
        except ApiError as error:
            _refused(error)


def json(data: bytes) -> None:
    """A large body: the values are orjson's."""
    try:
        mine = repr(read_large(data))
    except ApiError as error:  # too many values
        _refused(error)
        return
    except JsonError:
        mine = "refused"
    try:
        theirs = repr(orjson.loads(data))
    except orjson.JSONDecodeError:
        theirs = "refused"
    assert mine == theirs or (mine == "refused" and max(data.count(b"["), data.count(b"{")) > 32), (mine, theirs)


def grammar(data: bytes) -> None:
    """A regular expression, a grammar or a schema."""
    text = data[1:].decode(errors="replace")
    try:
        fields = {"structured_outputs": {_KINDS[data[0] % len(_KINDS) if data else 0]: text}, "prompt": ""}
        parsed = validate_request(fields, CompletionRequest, {})
        assert isinstance(parsed.structured_outputs, StructuredOutputs)
        grammar_of(None, parsed.structured_outputs)
    except ApiError as error:
        _refused(error)


def grpc(data: bytes) -> None:
    """A message of baton.v1.Inference."""
    try:
        check_size(data, inference_pb2.DESCRIPTOR.message_types_by_name["GenerateRequest"])
        message = inference_pb2.GenerateRequest.FromString(data)
        fields = {**prompt_fields(message), **other_fields(message)}
        if message.WhichOneof("prompt") == "chat":
            validate_request(fields, ChatRequest, {})
        else:
            validate_request(fields, CompletionRequest, {})
    except ApiError as error:
        _refused(error)
    except (TooManyFields, DecodeError):
        return


def gateway_message(data: bytes) -> None:
    """A gateway's message, as a worker reads and checks it."""
    try:
        message = parse_gateway_message(worker_pb2.GatewayMessage.FromString(data))
    except (WireError, DecodeError):
        return
    for command in message.commands if isinstance(message, Commands) else (message,):
        if isinstance(command, Submit):
            what_is_wrong(command, 1000)


def worker_message(data: bytes) -> None:
    """A worker's message, as a gateway reads it."""
    try:
        deserialize_worker_message(data)
    except WireError:
        return


def gzip(data: bytes) -> None:
    """A zipped body."""
    try:
        assert len(unzipped(data, 1 << 16)) <= 1 << 16
    except ApiError as error:
        _refused(error)


def _seeds() -> dict[str, list[bytes]]:
    """Bytes that each parser takes, to start from."""
    chat = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stop": ["a"], "n": 2}'
    text = b'{"prompt": [[5, 6], [7]], "logit_bias": {"5": 1.5}, "stream_options": {"include_usage": true}}'
    form = b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}'
    generate = inference_pb2.GenerateRequest(text="Hi", stop=["a"], logit_bias={5: 1.5}, stop_token_ids=[5], seed=-1)
    asked = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.Message(role="a")]))
    asked.chat.template_kwargs.update({"a": [1, None, {"b": True}]})
    asked.chat.tools.add(name="f", parameters='{"type": "object"}', strict=True)
    asked.chat.messages[0].tool_calls.add(id="1", name="f", arguments="{}")
    asked.chat.tool_choice = "required"
    asked.structured_outputs.choice.texts.append("a")
    submit = Submit(5, Capsule(np.array([1, 2, 3], np.int32), 3, SAMPLING), 1.5, "request", TakeFrom("a", WorkerId(1)))
    return {
        "request": [chat, text, form],
        "json": [chat, text, form, b'[[1, -2.5e3, null], "\\u00e9\\ud83d\\ude42", {}]'],
        "grammar": [b"\0(a|b)+", b'\1root ::= "a" r\nr ::= [0-9]+', b'\1start: "a" w\nw: /x+/', b'\2{"type": "array"}'],
        "grpc": [each.SerializeToString() for each in (generate, asked)],
        "gateway_message": [serialize_gateway_message(each) for each in (submit, Commands((submit, Abort(5))))],
        "worker_message": [pack_worker_message(each).SerializeToString() for each in (HELLO, a_frame())],
        "gzip": [zipped.compress(b"a" * 100, 1)],
    }


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (request, json, grammar, grpc, gateway_message, worker_message, gzip)
}


def _fuzz(target: str, corpus: Path, flags: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    for number, each in enumerate(_seeds()[target]):
        (corpus / str(number)).write_bytes(each)
    atheris.Setup([sys.argv[0], *flags, "-max_len=4096", "-timeout=10", str(corpus)], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    flags = [f"-runs={arguments.runs}", f"-seed={arguments.seed}", "-verbosity=0", "-print_final_stats=1"]
    if arguments.corpus is not None:
        _fuzz(arguments.target, arguments.corpus, flags)
    codes = []
    for target in TARGETS if arguments.target == "all" else [arguments.target]:
        options = ["--runs", str(arguments.runs), "--seed", str(arguments.seed)]
        with tempfile.TemporaryDirectory() as corpus:
            command = [sys.executable, "-m", "tests.fuzz_bytes", target, *options, "--corpus", corpus]
            codes.append(subprocess.call(command))
    print("exit codes:", codes)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
