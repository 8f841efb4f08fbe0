"""The handoff's messages as protobuf and back: the only place beside the kv streams that knows `kv_pb2`.

`parse_*` raises WireError for whatever cannot be what the other side meant.
"""

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.messages import (
    Announcement,
    Ended,
    EndReason,
    FirstToken,
    Open,
    Pulse,
    Release,
    ToConsumer,
    ToProducer,
)
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.byte_stream import ByteRequest
from protos import kv_pb2
from services.protocol.alternatives import alternatives_of, arrays_of
from services.protocol.frames import PackedLogprobs, TokenLogprobs
from services.protocol.wire import WireError, pack_logprobs, parse_logprobs

_MOST_BYTES = 1 << 40  # of a block


def pack_to_producer(message: ToProducer) -> kv_pb2.ConsumerMessage:
    """The protobuf form of what a consumer says."""
    match message:
        case Open(id, producer):
            return kv_pb2.ConsumerMessage(open=kv_pb2.Open(id=_pack_id(id), producer=producer))
        case Release(id):
            return kv_pb2.ConsumerMessage(release=kv_pb2.Release(id=_pack_id(id)))


def parse_to_producer(message: kv_pb2.ConsumerMessage) -> ToProducer:
    """Parses a consumer's message after its hello. Raises WireError."""
    match message.WhichOneof("message"):
        case "open":
            return Open(_parse_id(message.open.id), WorkerId(message.open.producer))
        case "release":
            return Release(_parse_id(message.release.id))
        case other:
            raise WireError(f"{other} from a consumer")


def pack_to_consumer(message: ToConsumer) -> kv_pb2.ProducerMessage:
    """The protobuf form of what a producer says."""
    match message:
        case Ended(id, reason):
            return kv_pb2.ProducerMessage(ended=kv_pb2.Ended(id=_pack_id(id), reason=reason))
        case Announcement():
            return kv_pb2.ProducerMessage(announcement=_pack_announcement(message))
        case Pulse():
            return kv_pb2.ProducerMessage(pulse=kv_pb2.Pulse())


def parse_to_consumer(message: kv_pb2.ProducerMessage) -> ToConsumer:
    """Parses a producer's message after its hello. Raises WireError."""
    match message.WhichOneof("message"):
        case "ended":
            return Ended(_parse_id(message.ended.id), EndReason.known(message.ended.reason))
        case "announcement":
            return _parse_announcement(message.announcement)
        case "pulse":
            return Pulse()
        case other:
            raise WireError(f"{other} from a producer")


def pack_process(process: ProcessIdentity) -> kv_pb2.Process:
    """The protobuf form of a producer's process."""
    return kv_pb2.Process(
        boot_id=process.boot_id,
        pid_namespace=process.pid_namespace,
        pid=process.pid,
        start_ticks=process.start_ticks,
    )


def parse_process(hello: kv_pb2.ProducerHello) -> ProcessIdentity | None:
    """Parses a producer's process; None where an older producer does not name it. Raises WireError."""
    if not hello.HasField("process"):
        return None
    packed = hello.process
    try:
        return ProcessIdentity(packed.boot_id, packed.pid_namespace, packed.pid, packed.start_ticks)
    except ValueError as error:
        raise WireError(str(error)) from error


def pack_read(request: ByteRequest) -> kv_pb2.ReadRequest:
    """The protobuf form of what a consumer asks of the blocks themselves."""
    ranges = [(own.start, own.stop) for own in request.ranges or ()]
    return kv_pb2.ReadRequest(
        key=request.key,
        blocks=request.blocks.astype("<u4").tobytes(),
        generations=request.generations.astype("<u8").tobytes(),
        ranges=np.array(ranges, dtype="<u8").tobytes(),
        no_data=request.ranges == (),
        no_words=not request.words,
    )


def parse_read(request: kv_pb2.ReadRequest) -> ByteRequest:
    """Parses a request for blocks. Raises WireError."""
    if len(request.blocks) % 4 or len(request.generations) != 2 * len(request.blocks):
        raise WireError(f"{len(request.blocks)} bytes of blocks, {len(request.generations)} of generations")
    ranges = _parse_ranges(request)
    if ranges == () and request.no_words:
        raise WireError("a read of nothing")
    blocks, generations = np.frombuffer(request.blocks, "<u4"), np.frombuffer(request.generations, "<u8")
    return ByteRequest(request.key, blocks, generations, ranges, not request.no_words)


def pack_words(words: np.ndarray) -> kv_pb2.ReadPiece:
    """The last piece of a read."""
    return kv_pb2.ReadPiece(generations=words.astype("<u8").tobytes())


def parse_words(piece: kv_pb2.ReadPiece) -> np.ndarray:
    """uint64[n] of a read's last piece, [0] of a read without generation words. Raises WireError."""
    if len(piece.generations) % 8:
        raise WireError(f"{len(piece.generations)} bytes of generations")
    return np.frombuffer(piece.generations, "<u8")


def _parse_ranges(request: kv_pb2.ReadRequest) -> tuple[range, ...] | None:
    if not request.ranges:
        return () if request.no_data else None
    if len(request.ranges) % 16 or request.no_data:
        raise WireError(f"{len(request.ranges)} bytes of ranges")
    ranges = np.frombuffer(request.ranges, "<u8").reshape(-1, 2)
    if (ranges[:, 0] >= ranges[:, 1]).any() or int(ranges.max()) > _MOST_BYTES:
        raise WireError("ranges of bytes that no block has")
    return tuple(range(*each) for each in ranges.tolist())


def _pack_announcement(message: Announcement) -> kv_pb2.Announcement:
    return kv_pb2.Announcement(
        id=_pack_id(message.id),
        first_index=message.first_index,
        blocks=np.array(message.blocks, dtype="<u4").tobytes(),
        generations=np.array(message.generations, dtype="<u8").tobytes(),
        first_tokens=[_pack_first_token(first) for first in message.first_tokens],
    )


def _parse_announcement(packed: kv_pb2.Announcement) -> Announcement:
    if len(packed.blocks) % 4 or len(packed.generations) != 2 * len(packed.blocks):
        raise WireError(f"{len(packed.blocks)} bytes of blocks, {len(packed.generations)} of generations")
    return Announcement(
        id=_parse_id(packed.id),
        first_index=packed.first_index,
        blocks=tuple(np.frombuffer(packed.blocks, "<u4").tolist()),
        generations=tuple(np.frombuffer(packed.generations, "<u8").tolist()),
        first_tokens=tuple(_parse_first_token(first) for first in packed.first_tokens),
    )


def _pack_first_token(first: FirstToken) -> kv_pb2.FirstToken:
    if first.logprobs is None:
        return kv_pb2.FirstToken(handle=first.handle, token=first.token)
    assert isinstance(first.logprobs, TokenLogprobs)
    ids, values = arrays_of(first.logprobs.top)
    packed = PackedLogprobs(
        widths=np.array([len(ids)], dtype=np.int32),
        sampled=np.array([first.logprobs.sampled], dtype=np.float32),
        top_ids=ids,
        top=values,
    )
    return kv_pb2.FirstToken(handle=first.handle, token=first.token, logprobs=pack_logprobs(packed))


def _parse_first_token(packed: kv_pb2.FirstToken) -> FirstToken:
    if not packed.HasField("logprobs"):
        return FirstToken(packed.handle, packed.token, None)
    logprobs = parse_logprobs(packed.logprobs)
    if len(logprobs.sampled) != 1 or len(logprobs.top_ids) != len(logprobs.top):
        raise WireError("logprobs of one token expected")
    top = alternatives_of(logprobs.top_ids, logprobs.top)
    return FirstToken(packed.handle, packed.token, TokenLogprobs(float(logprobs.sampled[0]), top))


def _pack_id(id: AttemptId) -> kv_pb2.HandoffId:
    return kv_pb2.HandoffId(gateway=id.gateway, handle=id.handle)


def _parse_id(packed: kv_pb2.HandoffId) -> AttemptId:
    return AttemptId(GatewayId(packed.gateway), packed.handle)
