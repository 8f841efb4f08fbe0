"""Messages as protobuf and back. Beside the servicers and the KV streams, nothing else knows protobuf types.

    stream         what a gateway's stream carries either way, as protobuf and as bytes
    hello          the first message of either side, and a worker's news
    commands       submits and aborts
    capsule        tokens and sampling parameters of a submit
    frame          rows, failures and load of a step; logprobs, which handoffs carry as well
    block_events   changes of a worker's prefix cache
    arrays         numpy arrays as bytes
    fields         fields that are copied as they are

`parse_*` raises WireError for whatever cannot be what the other side meant: arrays of the wrong length, an unknown
role, tokens that do not add up. What it returns can be used without further checks.
"""

from services.protocol.wire.capsule import pack_capsule, parse_capsule
from services.protocol.wire.errors import WireError
from services.protocol.wire.frame import pack_logprobs, parse_logprobs
from services.protocol.wire.stream import (
    deserialize_worker_message,
    pack_gateway_message,
    pack_worker_message,
    parse_gateway_message,
    parse_worker_message,
    serialize_gateway_message,
)

__all__ = [
    "WireError",
    "deserialize_worker_message",
    "pack_capsule",
    "pack_gateway_message",
    "pack_logprobs",
    "pack_worker_message",
    "parse_capsule",
    "parse_gateway_message",
    "parse_logprobs",
    "parse_worker_message",
    "serialize_gateway_message",
]
