"""Frames: rows, failures and load of one step. A step packs one for each gateway: nothing here is generic."""

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from protos import worker_pb2
from services.protocol.frames import Embeddings, Failure, Frame, Load, PackedLogprobs, Timing
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.wire.arrays import array_bytes, check_lengths, parse_array
from services.protocol.wire.errors import WireError

_LAST_FINISH_REASON = max(FinishReason)
_LONGEST_US = 0xFFFFFFFF
_LONGEST_WORD = 300  # characters of what becomes a label of metrics


def pack_frame(frame: Frame) -> worker_pb2.Frame:
    """Packs a frame."""
    return worker_pb2.Frame(
        handles=array_bytes(frame.handles, "<u4"),
        positions=array_bytes(frame.positions, "<u4"),
        counts=array_bytes(frame.counts, "<u4"),
        tokens=array_bytes(frame.tokens, "<i4"),
        finish=array_bytes(frame.finish, "u1"),
        cached=array_bytes(frame.cached, "<i4"),
        logprobs=pack_logprobs(frame.logprobs) if frame.logprobs is not None else None,
        failures=[
            worker_pb2.Failure(
                handle=failure.handle, code=failure.code, detail=failure.detail, end_reason=failure.end_reason or 0
            )
            for failure in frame.failures
        ],
        load=_pack_load(frame.load) if frame.load is not None else None,
        timings=[_pack_timing(timing) for timing in frame.timings],
        embeddings=_pack_embeddings(frame.embeddings) if frame.embeddings is not None else None,
    )


def parse_frame(packed: worker_pb2.Frame) -> Frame:
    """Parses a frame, whose arrays then fit together. Raises WireError."""
    frame = Frame(
        handles=parse_array(packed.handles, "<u4", "handles"),
        positions=parse_array(packed.positions, "<u4", "positions"),
        counts=parse_array(packed.counts, "<u4", "counts"),
        tokens=parse_array(packed.tokens, "<i4", "tokens"),
        finish=parse_array(packed.finish, "u1", "finish"),
        cached=parse_array(packed.cached, "<i4", "cached"),
        logprobs=parse_logprobs(packed.logprobs) if packed.HasField("logprobs") else None,
        failures=[_parse_failure(failure) for failure in packed.failures],
        load=_parse_load(packed.load) if packed.HasField("load") else None,
        timings=[_parse_timing(timing) for timing in packed.timings],
        embeddings=_parse_embeddings(packed.embeddings) if packed.HasField("embeddings") else None,
    )
    _check_frame(frame)
    return frame


def _check_frame(frame: Frame) -> None:
    rows = len(frame.handles)
    check_lengths(rows, frame.positions, frame.counts, frame.finish, frame.cached)
    # Not numpy's reductions: they cost more than all rows of a batch.
    check_lengths(sum(frame.counts.tolist()), frame.tokens)
    if (last := max(frame.finish.tolist(), default=0)) > _LAST_FINISH_REASON:
        raise WireError(f"finish reason {last}")
    packed = frame.logprobs
    if packed is None:
        return
    check_lengths(rows, packed.widths)
    asked = packed.widths >= 0
    counts = frame.counts[asked].astype(np.int64)
    check_lengths(int(counts.sum()), packed.sampled, *([] if packed.ranks is None else [packed.ranks]))
    check_lengths(int((counts * packed.widths[asked]).sum()), packed.top_ids, packed.top)


def pack_logprobs(logprobs: PackedLogprobs) -> worker_pb2.Logprobs:
    """Packs the logprobs of some rows."""
    return worker_pb2.Logprobs(
        widths=array_bytes(logprobs.widths, "<i4"),
        sampled=array_bytes(logprobs.sampled, "<f4"),
        top_ids=array_bytes(logprobs.top_ids, "<i4"),
        top=array_bytes(logprobs.top, "<f4"),
        ranks=b"" if logprobs.ranks is None else array_bytes(logprobs.ranks, "<i4"),
    )


def parse_logprobs(packed: worker_pb2.Logprobs) -> PackedLogprobs:
    """Parses the logprobs of some rows. Raises WireError; the caller checks that the arrays fit together."""
    return PackedLogprobs(
        widths=parse_array(packed.widths, "<i4", "widths"),
        sampled=parse_array(packed.sampled, "<f4", "sampled"),
        top_ids=parse_array(packed.top_ids, "<i4", "top_ids"),
        top=parse_array(packed.top, "<f4", "top"),
        ranks=parse_array(packed.ranks, "<i4", "ranks") if packed.ranks else None,
    )


def _pack_embeddings(embeddings: Embeddings) -> worker_pb2.Embeddings:
    return worker_pb2.Embeddings(
        handles=array_bytes(embeddings.handles, "<u4"),
        cached=array_bytes(embeddings.cached, "<i4"),
        values=array_bytes(embeddings.values, "<f4"),
    )


def _parse_embeddings(packed: worker_pb2.Embeddings) -> Embeddings:
    handles, cached = parse_array(packed.handles, "<u4", "handles"), parse_array(packed.cached, "<i4", "cached")
    values, number = parse_array(packed.values, "<f4", "values"), len(handles)
    check_lengths(number, cached)
    if not number or not len(values) or len(values) % number:
        raise WireError(f"{len(values)} numbers of {number} embeddings")
    return Embeddings(handles, cached, values.reshape(number, -1))


def _parse_failure(packed: worker_pb2.Failure) -> Failure:
    try:
        code = FailureCode(packed.code)
    except ValueError:
        # The code of a newer neighbour: all that it means here is that this attempt is over.
        code = FailureCode.HANDOFF
    end_reason = EndReason.known(packed.end_reason) if packed.end_reason else None
    return Failure(packed.handle, code, packed.detail, end_reason)


def _pack_timing(timing: Timing) -> worker_pb2.Timing:
    return worker_pb2.Timing(
        handle=timing.handle,
        announced_us=_microseconds(timing.announced_s),
        admitted_us=_microseconds(timing.admitted_s),
        ready_us=_microseconds(timing.ready_s),
        sent_us=_microseconds(timing.sent_s),
        transport=timing.moved.transport,
        why=timing.moved.why,
        kv_bytes=timing.moved.num_bytes,
        reading_us=_microseconds(timing.moved.reading_s or None),
    )


def _parse_timing(packed: worker_pb2.Timing) -> Timing:
    return Timing(
        handle=packed.handle,
        announced_s=_seconds(packed.announced_us),
        admitted_s=_seconds(packed.admitted_us),
        ready_s=_seconds(packed.ready_us),
        sent_s=packed.sent_us / 1e6,
        moved=_parse_moved(packed),
    )


def _parse_moved(packed: worker_pb2.Timing) -> Moved:
    transport, why = packed.transport[:_LONGEST_WORD], packed.why[:_LONGEST_WORD]
    return Moved(transport, why, packed.kv_bytes, packed.reading_us / 1e6)


def _microseconds(seconds: float | None) -> int:
    """Whole microseconds, at least 1; 0: None."""
    return 0 if seconds is None else min(max(1, round(seconds * 1e6)), _LONGEST_US)


def _seconds(microseconds: int) -> float | None:
    return microseconds / 1e6 if microseconds else None


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
        draining=load.draining,
        computed_tokens=load.computed_tokens,
        not_finite=load.not_finite,
        evicted_blocks=load.evicted_blocks,
        worst_expert_imbalance=load.worst_expert_imbalance,
        mean_expert_imbalance=load.mean_expert_imbalance,
        worst_rank_imbalance=load.worst_rank_imbalance,
        mean_rank_imbalance=load.mean_rank_imbalance,
        slowest_rank=load.slowest_rank,
        waited_for_slowest_rank=load.waited_for_slowest_rank,
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
        draining=packed.draining,
        computed_tokens=packed.computed_tokens,
        not_finite=packed.not_finite,
        evicted_blocks=packed.evicted_blocks,
        worst_expert_imbalance=packed.worst_expert_imbalance or None,
        mean_expert_imbalance=packed.mean_expert_imbalance or None,
        worst_rank_imbalance=packed.worst_rank_imbalance or None,
        mean_rank_imbalance=packed.mean_rank_imbalance or None,
        slowest_rank=packed.slowest_rank if packed.HasField("slowest_rank") else None,
        waited_for_slowest_rank=packed.waited_for_slowest_rank if packed.HasField("slowest_rank") else None,
    )
