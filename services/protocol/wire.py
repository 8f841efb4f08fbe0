"""Protobuf on one side, plain values on the other. Beside the servicers, nothing else knows protobuf types.

`parse_*` raises WireError for whatever cannot be what the other side meant: arrays of the wrong length, an unknown
role, tokens that do not add up. What it returns can be used without further checks.
"""

from collections.abc import Iterable

import numpy as np
from google.protobuf.message import DecodeError

from kvtransfer.ids import GatewayId, WorkerId
from protos import sampling_pb2, worker_pb2
from services.config import WorkerRole
from services.protocol.block_hash import HASH_BYTES, BlockHash
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure, Frame, Load, PackedLogprobs
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Command,
    Commands,
    GatewayHello,
    GatewayMessage,
    HandTo,
    Submit,
    TakeFrom,
    WorkerHello,
    WorkerMessage,
)
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import SamplingParams

_ROLES = {WorkerRole.PREFILL: worker_pb2.ROLE_PREFILL, WorkerRole.DECODE: worker_pb2.ROLE_DECODE}
_ROLE_NAMES = {number: role for role, number in _ROLES.items()}
_LAST_FINISH_REASON = max(FinishReason)


class WireError(ValueError):
    """A message that no correct peer sends."""


# Gateway to worker


def pack_gateway_message(message: GatewayMessage) -> worker_pb2.GatewayMessage:
    """The protobuf form of a hello or of commands."""
    match message:
        case Abort():
            return worker_pb2.GatewayMessage(abort=_pack_abort(message))
        case Submit():
            return worker_pb2.GatewayMessage(submit=_pack_submit(message))
        case Commands(commands):
            packed = worker_pb2.Commands(commands=map(_pack_command, commands))
            return worker_pb2.GatewayMessage(commands=packed)
        case GatewayHello():
            hello = worker_pb2.GatewayHello(
                protocol_major=message.protocol_major,
                protocol_minor=message.protocol_minor,
                gateway=message.gateway,
                highest_handle=message.highest_handle,
                without_block_events=not message.wants_block_events,
            )
            return worker_pb2.GatewayMessage(hello=hello)


def parse_gateway_message(message: worker_pb2.GatewayMessage) -> GatewayMessage:
    """What a gateway says. Raises WireError."""
    match message.WhichOneof("message"):
        case "abort" | "submit":
            return _parse_command(message)
        case "commands":
            return Commands(tuple(map(_parse_command, message.commands.commands)))
        case "hello":
            hello = message.hello
            return GatewayHello(
                gateway=GatewayId(hello.gateway),
                highest_handle=hello.highest_handle,
                wants_block_events=not hello.without_block_events,
                protocol_major=hello.protocol_major,
                protocol_minor=hello.protocol_minor,
            )
        case _:
            raise WireError("a gateway message without content")


def _pack_command(command: Command) -> worker_pb2.Command:
    if isinstance(command, Abort):
        return worker_pb2.Command(abort=_pack_abort(command))
    return worker_pb2.Command(submit=_pack_submit(command))


def _parse_command(packed: worker_pb2.Command | worker_pb2.GatewayMessage) -> Command:
    if packed.HasField("abort"):
        return Abort(packed.abort.handle)
    if packed.HasField("submit"):
        return _parse_submit(packed.submit)
    raise WireError("a command without content")


def _pack_abort(abort: Abort) -> worker_pb2.Abort:
    return worker_pb2.Abort(handle=abort.handle)


def _pack_submit(submit: Submit) -> worker_pb2.Submit:
    packed = worker_pb2.Submit(
        handle=submit.handle,
        capsule=pack_capsule(submit.capsule),
        timeout_s=submit.timeout_s,
        request_id=submit.request_id,
        seeds=submit.seeds,
    )
    match submit.handoff:
        case HandTo(worker):
            packed.hand_to.incarnation = worker
        case TakeFrom(address, worker):
            packed.take_from.address = address
            packed.take_from.incarnation = worker
        case None:
            pass
    return packed


def _parse_submit(packed: worker_pb2.Submit) -> Submit:
    handoff: HandTo | TakeFrom | None = None
    match packed.WhichOneof("handoff"):
        case "hand_to":
            handoff = HandTo(WorkerId(packed.hand_to.incarnation))
        case "take_from":
            handoff = TakeFrom(packed.take_from.address, WorkerId(packed.take_from.incarnation))
    if not packed.handle:
        raise WireError("a submit without a handle")
    return Submit(
        handle=packed.handle,
        capsule=parse_capsule(packed.capsule),
        timeout_s=packed.timeout_s,
        request_id=packed.request_id,
        handoff=handoff,
        seeds=tuple(packed.seeds),
    )


def pack_capsule(capsule: Capsule) -> sampling_pb2.Capsule:
    """The protobuf form of a capsule."""
    return sampling_pb2.Capsule(
        token_ids=_array_bytes(capsule.token_ids, "<i4"),
        num_prompt=capsule.num_prompt,
        sampling=_pack_sampling(capsule.sampling),
    )


def parse_capsule(packed: sampling_pb2.Capsule) -> Capsule:
    """A capsule. Raises WireError."""
    token_ids = _array(packed.token_ids, "<i4", "token_ids")
    if not 1 <= packed.num_prompt <= len(token_ids):
        raise WireError(f"{packed.num_prompt} prompt tokens among {len(token_ids)}")
    return Capsule(token_ids=token_ids, num_prompt=packed.num_prompt, sampling=_parse_sampling(packed.sampling))


def _pack_sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_token_ids=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
        bad_words=[sampling_pb2.BadWord(token_ids=word) for word in sampling.bad_words],
    )


def _parse_sampling(packed: sampling_pb2.SamplingParams) -> SamplingParams:
    if len(packed.bias_token_ids) != len(packed.bias_values):
        raise WireError(f"{len(packed.bias_token_ids)} token ids with {len(packed.bias_values)} values of logit bias")
    if not all(word.token_ids for word in packed.bad_words):
        raise WireError("a bad word without tokens")
    return SamplingParams(
        max_tokens=packed.max_tokens,
        temperature=packed.temperature,
        top_p=packed.top_p,
        top_k=packed.top_k,
        min_p=packed.min_p,
        seed=packed.seed,
        min_tokens=packed.min_tokens,
        ignore_eos=packed.ignore_eos,
        stop_token_ids=tuple(packed.stop_token_ids),
        num_logprobs=packed.num_logprobs if packed.HasField("num_logprobs") else None,
        num_prompt_logprobs=packed.num_prompt_logprobs if packed.HasField("num_prompt_logprobs") else None,
        presence_penalty=packed.presence_penalty,
        frequency_penalty=packed.frequency_penalty,
        repetition_penalty=packed.repetition_penalty if packed.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(packed.bias_token_ids, packed.bias_values, strict=True)),
        bad_words=tuple(tuple(word.token_ids) for word in packed.bad_words),
    )


# Worker to gateway


def pack_worker_message(message: WorkerMessage) -> worker_pb2.WorkerMessage:
    """The protobuf form of a hello, a frame or block events."""
    match message:
        case Frame():
            return worker_pb2.WorkerMessage(frame=_pack_frame(message))
        case BlockEvents():
            events = worker_pb2.BlockEvents(
                sequence=message.sequence,
                snapshot=message.snapshot,
                added=b"".join(message.added),
                evicted=b"".join(message.evicted),
            )
            return worker_pb2.WorkerMessage(blocks=events)
        case WorkerHello():
            return worker_pb2.WorkerMessage(hello=_pack_worker_hello(message))


def parse_worker_message(message: worker_pb2.WorkerMessage) -> WorkerMessage:
    """What a worker says. Raises WireError."""
    match message.WhichOneof("message"):
        case "frame":
            return _parse_frame(message.frame)
        case "blocks":
            events = message.blocks
            added, evicted = _parse_hashes(events.added), _parse_hashes(events.evicted)
            return BlockEvents(events.sequence, events.snapshot, added, evicted)
        case "hello":
            return _parse_worker_hello(message.hello)
        case _:
            raise WireError("a worker message without content")


def _pack_worker_hello(hello: WorkerHello) -> worker_pb2.WorkerHello:
    return worker_pb2.WorkerHello(
        protocol_major=hello.protocol_major,
        protocol_minor=hello.protocol_minor,
        incarnation=hello.worker_id,
        role=_ROLES[hello.role],
        fingerprint=hello.fingerprint,
        kv_protocol=hello.kv_protocol,
        transports=hello.transports,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        vocab_size=hello.vocab_size,
        model=hello.model,
        kernels=hello.kernels,
    )


def _parse_worker_hello(packed: worker_pb2.WorkerHello) -> WorkerHello:
    role = _ROLE_NAMES.get(packed.role)
    if role is None or packed.block_size < 1:
        raise WireError(f"a hello with role {packed.role} and block size {packed.block_size}")
    return WorkerHello(
        protocol_major=packed.protocol_major,
        protocol_minor=packed.protocol_minor,
        worker_id=WorkerId(packed.incarnation),
        role=role,
        fingerprint=packed.fingerprint,
        kv_protocol=packed.kv_protocol,
        transports=tuple(packed.transports),
        block_size=packed.block_size,
        num_blocks=packed.num_blocks,
        max_model_len=packed.max_model_len,
        max_num_seqs=packed.max_num_seqs,
        vocab_size=packed.vocab_size,
        model=packed.model,
        kernels=packed.kernels,
    )


def _pack_frame(frame: Frame) -> worker_pb2.Frame:
    return worker_pb2.Frame(
        handles=_array_bytes(frame.handles, "<u4"),
        positions=_array_bytes(frame.positions, "<u4"),
        counts=_array_bytes(frame.counts, "<u4"),
        tokens=_array_bytes(frame.tokens, "<i4"),
        finish=_array_bytes(frame.finish, "u1"),
        cached=_array_bytes(frame.cached, "<i4"),
        logprobs=pack_logprobs(frame.logprobs) if frame.logprobs is not None else None,
        failures=[
            worker_pb2.Failure(handle=failure.handle, code=failure.code, detail=failure.detail)
            for failure in frame.failures
        ],
        load=_pack_load(frame.load) if frame.load is not None else None,
    )


def _parse_frame(packed: worker_pb2.Frame) -> Frame:
    frame = Frame(
        handles=_array(packed.handles, "<u4", "handles"),
        positions=_array(packed.positions, "<u4", "positions"),
        counts=_array(packed.counts, "<u4", "counts"),
        tokens=_array(packed.tokens, "<i4", "tokens"),
        finish=_array(packed.finish, "u1", "finish"),
        cached=_array(packed.cached, "<i4", "cached"),
        logprobs=parse_logprobs(packed.logprobs) if packed.HasField("logprobs") else None,
        failures=[_parse_failure(failure) for failure in packed.failures],
        load=_parse_load(packed.load) if packed.HasField("load") else None,
    )
    _check_frame(frame)
    return frame


def _check_frame(frame: Frame) -> None:
    rows = len(frame.handles)
    _expect(rows, frame.positions, frame.counts, frame.finish, frame.cached)
    # Not numpy's reductions: they cost more than all rows of a batch.
    _expect(sum(frame.counts.tolist()), frame.tokens)
    if (last := max(frame.finish.tolist(), default=0)) > _LAST_FINISH_REASON:
        raise WireError(f"finish reason {last}")
    packed = frame.logprobs
    if packed is None:
        return
    _expect(rows, packed.widths)
    asked = packed.widths >= 0
    counts = frame.counts[asked].astype(np.int64)
    _expect(int(counts.sum()), packed.sampled)
    _expect(int((counts * packed.widths[asked]).sum()), packed.top_ids, packed.top)


def pack_logprobs(logprobs: PackedLogprobs) -> worker_pb2.Logprobs:
    """The protobuf form of the logprobs of some rows."""
    return worker_pb2.Logprobs(
        widths=_array_bytes(logprobs.widths, "<i4"),
        sampled=_array_bytes(logprobs.sampled, "<f4"),
        top_ids=_array_bytes(logprobs.top_ids, "<i4"),
        top=_array_bytes(logprobs.top, "<f4"),
    )


def parse_logprobs(packed: worker_pb2.Logprobs) -> PackedLogprobs:
    """The logprobs of some rows. Raises WireError; how the arrays fit together is for the caller to check."""
    return PackedLogprobs(
        widths=_array(packed.widths, "<i4", "widths"),
        sampled=_array(packed.sampled, "<f4", "sampled"),
        top_ids=_array(packed.top_ids, "<i4", "top_ids"),
        top=_array(packed.top, "<f4", "top"),
    )


def _parse_failure(packed: worker_pb2.Failure) -> Failure:
    try:
        code = FailureCode(packed.code)
    except ValueError:
        # A newer neighbour's code: what it means here is that this attempt is over.
        code = FailureCode.HANDOFF
    return Failure(packed.handle, code, packed.detail)


def _pack_load(load: Load) -> worker_pb2.Load:
    return worker_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        available_blocks=load.available_blocks,
        quarantined_blocks=load.quarantined_blocks,
        avoid=load.avoid,
        bytes_moved=load.bytes_moved,
        gc_collections=load.gc_collections,
        gc_pause_us=load.gc_pause_us,
    )


def _parse_load(packed: worker_pb2.Load) -> Load:
    return Load(
        running=packed.running,
        waiting=packed.waiting,
        waiting_tokens=packed.waiting_tokens,
        available_blocks=packed.available_blocks,
        quarantined_blocks=packed.quarantined_blocks,
        avoid=tuple(map(WorkerId, packed.avoid)),
        bytes_moved=packed.bytes_moved,
        gc_collections=packed.gc_collections,
        gc_pause_us=packed.gc_pause_us,
    )


# Arrays and bytes


def serialize_gateway_message(message: GatewayMessage) -> bytes:
    """The bytes of a gateway's message, for a stream that takes plain values."""
    return pack_gateway_message(message).SerializeToString()


def deserialize_worker_message(raw: bytes) -> WorkerMessage:
    """The other direction. Raises WireError."""
    try:
        return parse_worker_message(worker_pb2.WorkerMessage.FromString(raw))
    except DecodeError as error:
        raise WireError(str(error)) from error


def _array_bytes(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _array(raw: bytes, dtype: str, name: str) -> np.ndarray:
    if len(raw) % np.dtype(dtype).itemsize:
        raise WireError(f"{name} has {len(raw)} bytes, not a multiple of {np.dtype(dtype).itemsize}")
    return np.frombuffer(raw, dtype)


def _expect(length: int, *arrays: np.ndarray) -> None:
    if any(len(array) != length for array in arrays):
        raise WireError(f"arrays of lengths {[len(array) for array in arrays]} where {length} belong")


def _parse_hashes(raw: bytes) -> list[BlockHash]:
    if len(raw) % HASH_BYTES:
        raise WireError(f"{len(raw)} bytes of block hashes")
    starts: Iterable[int] = range(0, len(raw), HASH_BYTES)
    return [BlockHash(raw[at : at + HASH_BYTES]) for at in starts]
