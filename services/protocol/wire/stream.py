"""All that the stream between a gateway and a worker carries, as protobuf and as bytes."""

from google.protobuf.message import DecodeError

from protos import worker_pb2
from services.protocol.frames import Frame
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Commands,
    GatewayHello,
    GatewayMessage,
    Submit,
    WorkerHello,
    WorkerMessage,
    WorkerNews,
)
from services.protocol.wire.block_events import pack_block_events, parse_block_events
from services.protocol.wire.commands import pack_abort, pack_commands, pack_submit, parse_command, parse_commands
from services.protocol.wire.errors import WireError
from services.protocol.wire.frame import pack_frame, parse_frame
from services.protocol.wire.hello import (
    pack_gateway_hello,
    pack_worker_hello,
    pack_worker_news,
    parse_gateway_hello,
    parse_worker_hello,
    parse_worker_news,
)


def pack_gateway_message(message: GatewayMessage) -> worker_pb2.GatewayMessage:
    """Packs a hello or commands."""
    match message:
        case Abort():
            return worker_pb2.GatewayMessage(abort=pack_abort(message))
        case Submit():
            return worker_pb2.GatewayMessage(submit=pack_submit(message))
        case Commands():
            return worker_pb2.GatewayMessage(commands=pack_commands(message))
        case GatewayHello():
            return worker_pb2.GatewayMessage(hello=pack_gateway_hello(message))


def parse_gateway_message(message: worker_pb2.GatewayMessage) -> GatewayMessage:
    """Parses a gateway's message. Raises WireError."""
    match message.WhichOneof("message"):
        case "abort" | "submit":
            return parse_command(message)
        case "commands":
            return parse_commands(message.commands)
        case "hello":
            return parse_gateway_hello(message.hello)
        case _:
            raise WireError("a gateway message without content")


def pack_worker_message(message: WorkerMessage) -> worker_pb2.WorkerMessage:
    """Packs a hello, a frame, block events or news."""
    match message:
        case Frame():
            return worker_pb2.WorkerMessage(frame=pack_frame(message))
        case BlockEvents():
            return worker_pb2.WorkerMessage(blocks=pack_block_events(message))
        case WorkerHello():
            return worker_pb2.WorkerMessage(hello=pack_worker_hello(message))
        case WorkerNews():
            return worker_pb2.WorkerMessage(news=pack_worker_news(message))


def parse_worker_message(message: worker_pb2.WorkerMessage) -> WorkerMessage:
    """Parses a worker's message. Raises WireError."""
    match message.WhichOneof("message"):
        case "frame":
            return parse_frame(message.frame)
        case "blocks":
            return parse_block_events(message.blocks)
        case "hello":
            return parse_worker_hello(message.hello)
        case "news":
            return parse_worker_news(message.news)
        case _:
            raise WireError("a worker message without content")


def serialize_gateway_message(message: GatewayMessage) -> bytes:
    """Returns the bytes of a gateway's message, for a stream that carries bytes."""
    return pack_gateway_message(message).SerializeToString()


def deserialize_worker_message(raw: bytes) -> WorkerMessage:
    """Parses the bytes of a worker's message. Raises WireError."""
    try:
        return parse_worker_message(worker_pb2.WorkerMessage.FromString(raw))
    except DecodeError as error:
        raise WireError(str(error)) from error
