"""What goes through the wire comes out as it went in, and what no correct peer sends is refused."""

import contextlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import GatewayId, WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from protos import worker_pb2
from services.config import Pooling, WorkerRole
from services.protocol import wire
from services.protocol.block_hash import BlockHash
from services.protocol.capsule import Capsule
from services.protocol.frames import Embeddings, Failure, Frame, Load, PackedLogprobs, Timing, TokenLogprobs
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Commands,
    GatewayHello,
    GatewayMessage,
    HandTo,
    Submit,
    TakeFrom,
    WorkerHello,
    WorkerMessage,
    WorkerNews,
)
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import SamplingParams
from services.protocol.wire import WireError

TOP64 = 2**64 - 1

HELLO = WorkerHello(
    model="c0ffee",
    kernels="avx2",
    knows=frozenset({"cache_salt", "embeddings", "grammar", "other"}),
    embedding_size=64,
    kv_token_bytes=1 << 40,
    weight_bytes=1 << 41,
    shares_weights=True,
    num_ranks=4,
    worker_id=WorkerId(TOP64),
    role=WorkerRole.DECODE,
    fingerprint="abc",
    kv_protocol=3,
    transports=("nixl", "grpc"),
    block_size=16,
    num_blocks=7,
    max_model_len=2048,
    max_num_seqs=5,
    vocab_size=99,
    protocol_major=4,
    protocol_minor=6,
)

SAMPLING = SamplingParams(
    max_tokens=12,
    temperature=0.1,
    top_p=0.7,
    top_k=40,
    min_p=0.05,
    seed=TOP64,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=(5, 6),
    num_logprobs=0,
    num_prompt_logprobs=2,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    logit_bias=((3, -100.0), (7, 0.1)),
    bad_words=((1,), (2, 3)),
    grammar='start: "é"',
    allowed_token_ids=(3, 1),
    logprob_token_ids=(2, 4),
)


def through_gateway_wire(message: GatewayMessage) -> Any:
    raw = wire.serialize_gateway_message(message)
    return wire.parse_gateway_message(worker_pb2.GatewayMessage.FromString(raw))


def through_worker_wire(message: WorkerMessage) -> Any:
    return wire.deserialize_worker_message(wire.pack_worker_message(message).SerializeToString())


def a_frame() -> Frame:
    return Frame(
        handles=np.array([7, 2**32 - 1, 9], np.uint32),
        positions=np.array([3, 100, 0], np.uint32),
        counts=np.array([2, 1, 0], np.uint32),
        tokens=np.array([11, 12, 13], np.int32),
        finish=np.array([0, 1, 2], np.uint8),
        cached=np.array([-1, 32, -1], np.int32),
        logprobs=PackedLogprobs(
            widths=np.array([1, -1, 2], np.int32),
            sampled=np.array([-0.5, -1.5], np.float32),
            top_ids=np.array([11, 12], np.int32),
            top=np.array([-0.5, -1.25], np.float32),
            ranks=np.array([40, 0], np.int32),
        ),
        failures=[Failure(4, FailureCode.NOT_NOW, "full"), Failure(5, FailureCode.HANDOFF, "", EndReason.STALE)],
        timings=[
            Timing(4, None, 0.25, None, 1.5),
            Timing(5, 1e-6, 2e-6, 3e-6, 4e-6, Moved("nixl", "CMA", 1 << 33, 5e-6)),
        ],
        embeddings=Embeddings(
            np.array([6, 8], np.uint32), np.array([0, 16], np.int32), np.array([[0.5, -1.5], [2, 3]], np.float32)
        ),
        load=Load(
            1,
            2,
            3,
            4,
            5,
            (WorkerId(6), WorkerId(TOP64)),
            2**40,
            7,
            8,
            computed_tokens=2**41,
            not_finite=9,
            evicted_blocks=10,
            worst_expert_imbalance=2.5,
            mean_expert_imbalance=1.25,
            worst_rank_imbalance=1.75,
            mean_rank_imbalance=1.5,
            slowest_rank=0,
            waited_for_slowest_rank=0.25,
        ),
    )


def assert_same(left: Any, right: Any) -> None:
    """Equality that looks into arrays."""
    assert type(left) is type(right)
    for name in (field.name for field in fields(left)):
        one, other = getattr(left, name), getattr(right, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
        elif isinstance(one, Capsule | PackedLogprobs | Embeddings):
            assert_same(one, other)
        else:
            assert one == other, name


@pytest.mark.parametrize(
    "handoff", [None, HandTo(WorkerId(TOP64)), TakeFrom("[::1]:9100", WorkerId(1)), HandTo(WorkerId(0))]
)
def test_a_submit_survives(handoff: HandTo | TakeFrom | None):
    capsule = Capsule(np.array([1, 2, 3, 4], np.int32), 3, SAMPLING)
    submit = Submit(2**32 - 1, capsule, 1.5, "request", handoff)
    assert_same(through_gateway_wire(submit), submit)


@pytest.mark.parametrize("pooling", [None, *Pooling])
def test_a_way_of_pooling_survives(pooling: Pooling | None):
    capsule = Capsule(np.array([1], np.int32), 1, SamplingParams(max_tokens=0), pooling=pooling)
    assert wire.parse_capsule(wire.pack_capsule(capsule)).pooling is pooling


def test_the_place_of_a_second_text_survives():
    capsule = Capsule(np.arange(9, dtype=np.int32), 9, SamplingParams(max_tokens=0), pooling=Pooling.CLS)
    for place in (0, 1, 8):
        packed = wire.pack_capsule(replace(capsule, second_text=place))
        assert wire.parse_capsule(packed).second_text == place


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_each_sampling_parameter_survives(name: str):
    """One at a time, with a value of its own: two that are swapped would not be."""
    plain = SamplingParams(max_tokens=1)
    sampling = replace(plain, **{name: getattr(SAMPLING, name)})
    assert sampling != plain
    capsule = Capsule(np.array([1], np.int32), 1, sampling)
    assert wire.parse_capsule(wire.pack_capsule(capsule)).sampling == sampling


def test_salt_and_priority_of_a_capsule_survive():
    for priority in (-(2**31), 0, 2**31 - 1):
        capsule = Capsule(np.array([1], np.int32), 1, SAMPLING, "salt", priority)
        parsed = wire.parse_capsule(wire.pack_capsule(capsule))
        assert (parsed.cache_salt, parsed.priority) == ("salt", priority)


def test_no_logprobs_and_zero_alternatives_are_not_the_same():
    for asked in (None, 0, 5):
        capsule = Capsule(np.array([1], np.int32), 1, replace(SAMPLING, num_logprobs=asked))
        assert wire.parse_capsule(wire.pack_capsule(capsule)).sampling.num_logprobs == asked


def test_hellos_and_aborts_survive():
    for hello in (GatewayHello(GatewayId(TOP64), 77, True, 3, 9), GatewayHello(GatewayId(TOP64), 77, False, 3, 9)):
        assert through_gateway_wire(hello) == hello
    assert through_gateway_wire(Abort(5)) == Abort(5)
    assert through_gateway_wire(Commands((Abort(5), Abort(2)))) == Commands((Abort(5), Abort(2)))
    assert through_worker_wire(HELLO) == HELLO
    assert through_worker_wire(replace(HELLO, role=WorkerRole.PREFILL)).role is WorkerRole.PREFILL


@pytest.mark.parametrize("known", [set(), {"grammar"}, {"embeddings"}, {"grammar", "embeddings"}])
def test_a_hello_says_older_capabilities_in_the_fields_that_older_versions_read_and_write(known: set[str]):
    hello = replace(HELLO, knows=frozenset({"cache_salt", *known}), embedding_size=9 * ("embeddings" in known))
    packed = wire.pack_worker_message(hello)
    assert (packed.hello.guides, packed.hello.embedding_size > 0) == ("grammar" in known, "embeddings" in known)
    del packed.hello.knows[:]
    assert through_worker_wire(hello) == hello
    parsed = wire.parse_worker_message(packed)
    assert isinstance(parsed, WorkerHello)
    assert parsed.knows == known


def test_news_survive():
    for news in (WorkerNews(frozenset({"grammar", "other"}), 7), WorkerNews(frozenset())):
        assert through_worker_wire(news) == news


def test_messages_of_commands_put_together_are_one():
    capsule = Capsule(np.array([1, 2], np.int32), 2, SAMPLING)
    commands = (Submit(1, capsule, 1.5, "one"), Abort(1), Submit(2, capsule, 2.5, "two", HandTo(WorkerId(TOP64))))
    raw = b"".join(wire.serialize_gateway_message(Commands((command,))) for command in commands)
    parsed = wire.parse_gateway_message(worker_pb2.GatewayMessage.FromString(raw))
    assert isinstance(parsed, Commands)
    for one, other in zip(parsed.commands, commands, strict=True):
        assert_same(one, other)


def test_block_events_survive():
    events = BlockEvents(2**40, True, [BlockHash(bytes(range(16))), BlockHash(b"x" * 16)], [BlockHash(b"y" * 16)])
    assert through_worker_wire(events) == events


def test_a_frame_survives():
    assert_same(through_worker_wire(a_frame()), a_frame())


def test_a_frames_rows_hold_what_belongs_together():
    first, second, third = through_worker_wire(a_frame()).rows()
    assert (first.handle, first.position, first.tokens, first.finish) == (7, 3, [11, 12], FinishReason.NONE)
    assert first.logprobs == [TokenLogprobs(-0.5, ((11, -0.5),), 40), TokenLogprobs(-1.5, ((12, -1.25),))]
    assert (second.handle, second.tokens, second.finish, second.cached) == (2**32 - 1, [13], FinishReason.STOP, 32)
    assert second.logprobs is None
    assert (third.tokens, third.finish, third.logprobs) == ([], FinishReason.LENGTH, [])


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.integers(-1, 2)), max_size=5))
def test_rows_of_any_widths_survive(rows: list[tuple[list[int], int]]):
    asked = [(tokens, width) for tokens, width in rows if width >= 0]
    entries = [token for tokens, width in asked for token in tokens for _ in range(width)]
    count = len(rows)
    frame = Frame(
        handles=np.arange(count, dtype=np.uint32),
        positions=np.zeros(count, np.uint32),
        counts=np.array([len(tokens) for tokens, _ in rows], np.uint32),
        tokens=np.array([token for tokens, _ in rows for token in tokens], np.int32),
        finish=np.zeros(count, np.uint8),
        cached=np.full(count, -1, np.int32),
        logprobs=PackedLogprobs(
            widths=np.array([width for _, width in rows], np.int32),
            sampled=np.array([token for tokens, _ in asked for token in tokens], np.float32),
            top_ids=np.array(entries, np.int32),
            top=np.array(entries, np.float32),
        ),
    )
    for row, (tokens, width) in zip(through_worker_wire(frame).rows(), rows, strict=True):
        assert row.tokens == tokens
        if width < 0:
            assert row.logprobs is None
        else:
            assert row.logprobs == [TokenLogprobs(float(token), ((token, float(token)),) * width) for token in tokens]


def test_ranks_of_other_tokens_than_there_are_logprobs_of_are_refused():
    frame = a_frame()
    assert frame.logprobs is not None
    frame.logprobs.ranks = np.array([1, 2, 3], np.int32)
    with pytest.raises(wire.WireError):
        through_worker_wire(frame)


def test_a_failure_code_of_a_newer_neighbour_is_a_failed_attempt():
    packed = worker_pb2.WorkerMessage(frame=worker_pb2.Frame(failures=[worker_pb2.Failure(handle=3, code=99)]))
    frame = wire.parse_worker_message(packed)
    assert isinstance(frame, Frame)
    assert frame.failures == [Failure(3, FailureCode.HANDOFF)]


def test_an_end_reason_of_a_newer_neighbour_is_a_failed_handoff():
    failure = worker_pb2.Failure(handle=3, code=FailureCode.HANDOFF, end_reason=99)
    frame = wire.parse_worker_message(worker_pb2.WorkerMessage(frame=worker_pb2.Frame(failures=[failure])))
    assert isinstance(frame, Frame)
    assert frame.failures == [Failure(3, FailureCode.HANDOFF, "", EndReason.FAILED)]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"positions": np.zeros(2, np.uint32)},
        {"counts": np.array([2, 1, 1], np.uint32)},
        {"tokens": np.zeros(2, np.int32)},
        {"finish": np.array([0, 0, 3], np.uint8)},
        {"cached": np.zeros(4, np.int32)},
        {"logprobs": replace(a_frame().logprobs, widths=np.zeros(2, np.int32))},  # type: ignore[type-var]
        {"logprobs": replace(a_frame().logprobs, sampled=np.zeros(3, np.float32))},  # type: ignore[type-var]
        {"logprobs": replace(a_frame().logprobs, top=np.zeros(3, np.float32))},  # type: ignore[type-var]
        {"embeddings": Embeddings(np.zeros(2, np.uint32), np.zeros(1, np.int32), np.zeros((2, 2), np.float32))},
        {"embeddings": Embeddings(np.zeros(2, np.uint32), np.zeros(2, np.int32), np.zeros((1, 3), np.float32))},
        {"embeddings": Embeddings(np.zeros(2, np.uint32), np.zeros(2, np.int32), np.zeros((2, 0), np.float32))},
        {"embeddings": Embeddings(np.zeros(0, np.uint32), np.zeros(0, np.int32), np.zeros((1, 3), np.float32))},
    ],
    ids=lambda spoiled: next(iter(spoiled)),
)
def test_arrays_that_do_not_fit_together_are_refused(spoiled: dict[str, Any]):
    with pytest.raises(WireError):
        through_worker_wire(replace(a_frame(), **spoiled))


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff",
        b"",
        worker_pb2.WorkerMessage(frame=worker_pb2.Frame(handles=b"abc")).SerializeToString(),
        worker_pb2.WorkerMessage(blocks=worker_pb2.BlockEvents(added=b"too short")).SerializeToString(),
        worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(block_size=16)).SerializeToString(),
        worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(role=worker_pb2.ROLE_DECODE)).SerializeToString(),
    ],
    ids=["no protobuf", "empty", "torn array", "torn hash", "no role", "no block size"],
)
def test_what_no_worker_sends_is_refused(raw: bytes):
    with pytest.raises(WireError):
        wire.deserialize_worker_message(raw)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(at=st.integers(0, 1 << 12), cut=st.integers(0, 8), put=st.binary(max_size=8))
def test_a_damaged_message_is_read_or_refused(at: int, cut: int, put: bytes):
    """Nothing else is raised, on either side. tests/fuzz_bytes.py damages more of them."""
    capsule = Capsule(np.array([1, 2, 3], np.int32), 3, SAMPLING)
    sent = wire.serialize_gateway_message(
        Commands((Submit(5, capsule, 1.5, "a", TakeFrom("a", WorkerId(1))), Abort(5)))
    )
    start = at % len(sent)
    with contextlib.suppress(WireError, DecodeError):
        wire.parse_gateway_message(worker_pb2.GatewayMessage.FromString(sent[:start] + put + sent[start + cut :]))
    for message in (HELLO, a_frame()):
        sent = wire.pack_worker_message(message).SerializeToString()
        start = at % len(sent)
        with contextlib.suppress(WireError):
            wire.deserialize_worker_message(sent[:start] + put + sent[start + cut :])


def test_a_command_without_content_is_refused_whatever_is_beside_it():
    packed = wire.pack_gateway_message(Commands((Abort(5),)))
    packed.commands.commands.add()
    for message in (worker_pb2.GatewayMessage(), packed):
        with pytest.raises(WireError):
            wire.parse_gateway_message(message)


def test_a_way_of_pooling_that_nobody_knows_is_refused():
    packed = wire.pack_capsule(Capsule(np.array([1], np.int32), 1, SamplingParams(max_tokens=0), pooling=Pooling.LAST))
    packed.pooling = "max"
    with pytest.raises(WireError, match="max"):
        wire.parse_capsule(packed)


def test_a_capsule_without_a_prompt_is_refused():
    for num_prompt in (0, 3):
        capsule = Capsule(np.array([1, 2], np.int32), num_prompt, SAMPLING)
        with pytest.raises(WireError):
            wire.parse_capsule(wire.pack_capsule(capsule))
