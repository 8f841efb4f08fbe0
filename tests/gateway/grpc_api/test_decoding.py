"""Bytes that are no message, or too large a message."""

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from protos import inference_pb2
from services.gateway.grpc_api.message_size import MAX_FIELDS, MAX_NUMBERS, TooManyFields, check_size

DESCRIPTOR: Any = inference_pb2.GenerateRequest.DESCRIPTOR


def chat(count: int) -> bytes:
    messages = [inference_pb2.Message(role="user", content="word")] * count
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages)).SerializeToString()


def ids(count: int, token: int = 300) -> bytes:
    return inference_pb2.GenerateRequest(token_ids={"ids": [token] * count}).SerializeToString()


def test_the_fields_of_all_messages_count():
    check_size(chat(MAX_FIELDS // 3 - 10), DESCRIPTOR)
    with pytest.raises(TooManyFields, match=str(MAX_FIELDS)):
        check_size(chat(MAX_FIELDS // 3 + 1), DESCRIPTOR)
    nested = inference_pb2.GenerateRequest()
    nested.chat.template_kwargs.update({"a": [[] for _ in range(MAX_FIELDS)]})
    with pytest.raises(TooManyFields):
        check_size(nested.SerializeToString(), DESCRIPTOR)
    with pytest.raises(TooManyFields):
        check_size(b"\x22\x80\x80\x01" + b"\x0a\x00" * MAX_FIELDS, DESCRIPTOR)  # empty messages


@pytest.mark.parametrize("token", [1, 300, 2**32 - 1])
def test_the_numbers_of_a_list_count_whatever_their_length(token: int):
    check_size(ids(MAX_NUMBERS, token), DESCRIPTOR)
    with pytest.raises(TooManyFields, match=str(MAX_NUMBERS)):
        check_size(ids(MAX_NUMBERS + 1, token), DESCRIPTOR)


def test_a_long_text_is_one_field():
    check_size(inference_pb2.GenerateRequest(text="word " * 1_000_000).SerializeToString(), DESCRIPTOR)


def test_any_bytes_pass_up_to_where_they_are_no_message():
    """The walk refuses nothing but numbers: what it reads wrong, the decoder reads wrong too."""
    random = np.random.default_rng(5)
    refused = 0
    for size in range(300):
        data = random.integers(0, 256, size, np.uint8).tobytes()
        check_size(data, DESCRIPTOR)
        try:
            inference_pb2.GenerateRequest.FromString(data)
        except DecodeError:
            refused += 1
    assert refused > 200
