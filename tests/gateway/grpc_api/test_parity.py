"""Every field of HTTP's requests has its field over gRPC, or a row in the README of the room."""

import re
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf

from protos import inference_pb2
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest
from services.gateway.api.requests.chat import ChatRequest, Message
from services.gateway.api.requests.earlier_calls import CalledFunction, EarlierCall
from services.gateway.api.requests.structured import StructuredOutputs
from services.gateway.api.requests.tools import Function, FunctionTool
from services.gateway.grpc_api.requests import embedding_fields, other_fields, prompt_fields
from tests.test_docs import ROOT, rows

README = ROOT / "services/gateway/grpc_api/README.md"
_SET = {
    FieldDescriptor.CPPTYPE_STRING: "1",  # which is JSON too
    FieldDescriptor.CPPTYPE_BOOL: True,
}


def filled(message: Any) -> Any:
    """Sets every field of a message, and of those in it; of a oneof the last one."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[1] = 1.0
        elif field.message_type is not None:
            inner = value.add() if field.is_repeated else value
            inner.SetInParent()
            if field.message_type.file is message.DESCRIPTOR.file:
                filled(inner)
        elif field.is_repeated:
            value.append(_SET.get(field.cpp_type, 1))
        else:
            setattr(message, field.name, _SET.get(field.cpp_type, 1))
    return message


def given(fields: dict[str, Any]) -> set[str]:
    return {name for name, value in fields.items() if value is not None}


def generate_fields(prompt: Protobuf | str) -> dict[str, Any]:
    """The fields of a request that has them all, with this prompt."""
    request = filled(inference_pb2.GenerateRequest())
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(prompt)
    return {"model": request.model, **prompt_fields(request), **other_fields(request)}


def not_over_grpc() -> set[str]:
    """The fields of HTTP's requests that nothing in a gRPC request becomes."""
    chat = generate_fields(filled(inference_pb2.Chat()))
    (message,), (tool,) = chat["messages"], chat["tools"]
    (call,) = message["tool_calls"]
    embedding = {"model": "m", **embedding_fields(filled(inference_pb2.EmbedRequest()))}
    forms = inference_pb2.StructuredOutputs.DESCRIPTOR.fields_by_name
    forms_known = {StructuredOutputs.model_fields[name].alias or name for name in StructuredOutputs.model_fields}
    pairs = [
        (set(ChatRequest.model_fields), chat),
        (set(CompletionRequest.model_fields), generate_fields("Hi")),
        (set(EmbeddingRequest.model_fields), embedding),
        (set(Message.model_fields), message),
        (set(FunctionTool.model_fields), tool),
        (set(Function.model_fields), tool["function"]),
        (set(EarlierCall.model_fields) - {"type", "custom"}, call),  # which is always a function's
        (set(CalledFunction.model_fields), call["function"]),
        (forms_known, dict(forms)),
    ]
    return {name for known, fields in pairs for name in known - given(fields)}


def test_the_readme_names_every_field_that_grpc_does_not_have():
    named = {
        name
        for cells in rows(README, "## What HTTP takes and gRPC does not")
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert named == not_over_grpc()


def test_every_field_of_a_grpc_request_becomes_one():
    """None is accepted and ignored: without any one of them, the translated request is another."""
    for message, translate in (
        (filled(inference_pb2.Chat()), generate_fields),
        (filled(inference_pb2.EmbedRequest()), embedding_fields),
    ):
        whole = translate(message)
        for field in message.DESCRIPTOR.fields:
            without = type(message)()
            without.CopyFrom(message)
            without.ClearField(field.name)
            if message.HasField(field.name) if field.has_presence else getattr(message, field.name):
                assert field.name == "model" or translate(without) != whole, field.name


def test_no_field_of_a_generate_request_is_ignored():
    request = filled(inference_pb2.GenerateRequest())
    whole = {**prompt_fields(request), **other_fields(request)}
    for field in request.DESCRIPTOR.fields:
        if field.containing_oneof is None and field.name != "model":
            without = inference_pb2.GenerateRequest()
            without.CopyFrom(request)
            without.ClearField(field.name)
            assert {**prompt_fields(without), **other_fields(without)} != whole, field.name
