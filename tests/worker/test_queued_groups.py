"""Aborts of single choices while their group waits in a worker: for its producer, or for room."""

import math

import numpy as np
import pytest

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, Open, Release
from kvtransfer.producer import Producer
from services.engine.engine import Engine
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request import Branch, Kind, Request
from services.engine.sequences.request_table import State
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.worker.core.core import WorkerCore

GATEWAY, PRODUCER, STREAM = GatewayId(7), WorkerId(5), StreamId(3)


def make_core() -> WorkerCore:
    """A decode worker with room for 9 tokens."""
    engine = Engine(
        SimulatedRunner(5, 2), DecodeScheduler(64), max_num_seqs=8, max_model_len=40, eos_token_ids=(), pipeline_depth=0
    )
    marks = HandleMarks()
    core = WorkerCore(engine, WorkerId(1), Producer(WorkerId(1), marks), Consumer(), marks)
    core.from_gateways.hello(GATEWAY, 0)
    core.from_producers.stream_up(PRODUCER, STREAM, 0.0)
    return core


def submit(core: WorkerCore, handle: int, length: int, kind: Kind, num_branches: int) -> None:
    capsule = Capsule(np.arange(length, dtype=np.int32), length, SamplingParams(max_tokens=30, temperature=0))
    branches = tuple(Branch(AttemptId(GATEWAY, handle + 1 + index), index) for index in range(num_branches))
    id = AttemptId(GATEWAY, handle)
    core.from_gateways.submit(Request(id, capsule, kind, 0.0, math.inf, paired_with=PRODUCER, branches=branches), 0.0)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("aborted", [[11], [12], [11, 12]])
def test_choices_that_are_aborted_before_their_blocks_move_do_not_begin(announced: bool, aborted: list[int]):
    """Parked, or waiting for room; the last choice ends the handoff."""
    core = make_core()
    submit(core, 1, 7, Kind.LOCAL, 0)
    core.step(0.0)
    group = AttemptId(GATEWAY, 10)
    submit(core, 10, 4, Kind.CONSUME, 2)
    if announced:
        core.from_producers.message(STREAM, Announcement(group, 0, (1,), (1,), ()), 0.0)
    core.step(0.0)
    requests = core.engine.sequences.requests
    queue = requests.in_state(State.WAITING if announced else State.PARKED)
    assert [request.id for request in queue] == [group]
    for handle in aborted:
        core.from_gateways.abort(AttemptId(GATEWAY, handle), 0.0)
        core.engine.sequences.check()
    messages = [message for _, message in core.take_outputs(0.0).messages]
    assert any(isinstance(message, Open) for message in messages)
    if len(aborted) == 2:
        assert Release(group) in messages
        assert core.open_ids == {AttemptId(GATEWAY, 1)}
        return
    (waiting,) = queue
    assert {branch.id.handle for branch in waiting.branches} == {11, 12} - set(aborted)
    core.from_gateways.abort(AttemptId(GATEWAY, 1), 0.0)
    core.from_producers.message(STREAM, Announcement(group, 0, (1, 2), (1, 1), ()), 0.0)
    core.step(0.0)
    assert {id.handle for id in requests.ids} == {10, 11, 12} - set(aborted)
