"""Rows of several steps become one frame for each gateway, with what belongs to them."""

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.messages import Announcement, FirstToken
from services.engine.runner.base import StepLogprobs
from services.engine.sequences.outputs import StepRows, single_row, sole_gateway
from services.protocol import wire
from services.protocol.alternatives import alternatives_of
from services.protocol.frames import Frame, Load, TokenLogprobs
from services.worker import kv_wire
from services.worker.frame_builder import build_frame


def step_rows(gateways: list[int], widths: list[int], logprobs: StepLogprobs | None) -> StepRows:
    count = len(gateways)
    of_gateways = np.array(gateways, np.uint64)
    return StepRows(
        gateway=sole_gateway(of_gateways),
        gateways=of_gateways,
        handles=np.arange(1, count + 1, dtype=np.uint32),
        positions=np.full(count, 4, np.uint32),
        counts=np.ones(count, np.uint32),
        tokens=np.arange(10, 10 + count, dtype=np.int32),
        finish=np.zeros(count, np.uint8),
        cached=np.full(count, -1, np.int32),
        widths=np.array(widths, np.int32),
        logprobs=logprobs,
    )


def logprobs_of(count: int, *, with_ranks: bool) -> StepLogprobs:
    """Row r has -r for itself, the alternatives r and r + 100, and the rank r + 1."""
    rows = np.arange(count)
    return StepLogprobs(
        sampled=-rows.astype(np.float32),
        top_ids=np.stack([rows, rows + 100], axis=1).astype(np.int32),
        top=np.zeros((count, 2), np.float32),
        ranks=(rows + 1).astype(np.int32) if with_ranks else None,
    )


def test_rows_have_their_own_logprobs_and_ranks_whatever_is_beside_them() -> None:
    """Scored rows of two gateways, sampled rows that have no ranks, and rows without logprobs."""
    scored = step_rows([7, 8, 7], [2, 1, 0], logprobs_of(3, with_ranks=True))
    sampled = step_rows([7, 7], [-1, 1], logprobs_of(2, with_ranks=False))
    plain = step_rows([8, 7], [-1, -1], None)
    rows = [*build_frame([scored, sampled, plain], GatewayId(7), [], Load()).rows()]
    first, third = TokenLogprobs(-0.0, ((0, 0.0), (100, 0.0)), 1), TokenLogprobs(-2.0, (), 3)
    expected = [[first], [third], None, [TokenLogprobs(-1.0, ((1, 0.0),))], None]
    assert [row.logprobs for row in rows] == expected
    (other, without) = build_frame([scored, sampled, plain], GatewayId(8), [], Load()).rows()
    assert (other.handle, other.logprobs) == (2, [TokenLogprobs(-1.0, ((1, 0.0),), 2)])
    assert without.logprobs is None


def test_many_alternatives_of_a_row_travel_beside_few() -> None:
    """Through the wire: as packed, parsed and read."""
    logprobs = logprobs_of(3, with_ranks=True)
    logprobs.wide = {1: (np.arange(300, dtype=np.int32), np.linspace(0, -9, 300, dtype=np.float32))}
    frame = build_frame([step_rows([7, 7, 7], [2, 300, -1], logprobs)], GatewayId(7), [], Load())
    parsed = wire.deserialize_worker_message(wire.pack_worker_message(frame).SerializeToString())
    assert isinstance(parsed, Frame)
    few, many, none = parsed.rows()
    assert few.logprobs == [TokenLogprobs(-0.0, ((0, 0.0), (100, 0.0)), 1)]
    assert none.logprobs is None
    assert many.logprobs is not None
    (found,) = many.logprobs
    assert (found.sampled, found.rank, len(found.top)) == (-1.0, 2, 300)
    assert [*found.top] == list(zip(range(300), np.linspace(0, -9, 300, dtype=np.float32).tolist(), strict=True))
    assert (found.top[3], [*found.top[:2]]) == ([*found.top][3], [*found.top][:2])


def test_a_first_token_takes_many_alternatives_to_the_consumer() -> None:
    top = alternatives_of(np.arange(300, dtype=np.int32), np.linspace(0, -9, 300, dtype=np.float32))
    first = FirstToken(7, 11, TokenLogprobs(-0.5, top))
    announcement = Announcement(AttemptId(GatewayId(7), 7), 0, (), (), (first,))
    parsed = kv_wire.parse_to_consumer(kv_wire.pack_to_consumer(announcement))
    assert isinstance(parsed, Announcement)
    (found,) = parsed.first_tokens
    assert found == first
    assert isinstance(found.logprobs, TokenLogprobs)
    rows = single_row(AttemptId(GatewayId(7), 7), 5, 11, 0, found.logprobs)
    (row,) = build_frame([rows], GatewayId(7), [], Load()).rows()
    assert row.logprobs == [first.logprobs]


def test_a_frame_without_scored_rows_has_no_ranks() -> None:
    frame = build_frame([step_rows([7], [2], logprobs_of(1, with_ranks=False))], GatewayId(7), [], Load())
    assert frame.logprobs is not None
    assert frame.logprobs.ranks is None
