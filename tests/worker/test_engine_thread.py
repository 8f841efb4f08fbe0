"""What a round of the engine thread does before its step, which may take long, and what only after it."""

import math
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, StreamId, WorkerId
from kvtransfer.messages import Announcement, FirstToken, Open, Release, ToConsumer, ToProducer
from kvtransfer.producer import Producer
from kvtransfer.transports.base import BlockRead, ReadEnd
from services.engine.engine import Engine
from services.engine.runner.base import StepInput, StepOutput
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.base import Scheduler
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs
from services.worker.engine_thread import EngineThread, no_pause

GATEWAY, US, OTHER = GatewayId(7), WorkerId(1), WorkerId(2)
STREAM = StreamId(1)
PROMPT = np.arange(12, dtype=np.int32)  # three blocks


class Rounds:
    """A core with one sequence of its own that computes all the time, and what its rounds did, in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        kind: Kind,
        max_tokens: int,
        decode_pause_s: Callable[[], float] = no_pause,
        clock: Callable[[], float] = time.monotonic,
        pipeline_depth: int = 0,
    ) -> None:
        self.happened: list[str | BlockRead | ToConsumer | ToProducer] = []
        self.sent: list[tuple[int, list[int]]] = []  # of each frame with tokens: steps launched before it, positions
        engine = Engine(
            _Listed(self.happened),
            scheduler,
            max_num_seqs=4,
            max_model_len=64,
            eos_token_ids=(),
            pipeline_depth=pipeline_depth,
        )
        marks = HandleMarks()
        self.core = WorkerCore(engine, US, Producer(US, marks), Consumer(), marks)
        self.thread = EngineThread(self.core, self._take, self.happened.append, decode_pause_s, clock)
        self.round = self.thread.round
        self.core.from_gateways.hello(GATEWAY, 0)
        self.submit(1, kind, max_tokens)

    def submit(self, handle: int, kind: Kind, max_tokens: int) -> AttemptId:
        id = AttemptId(GATEWAY, handle)
        capsule = Capsule(PROMPT + handle, len(PROMPT), SamplingParams(max_tokens=max_tokens))
        self.core.from_gateways.submit(
            Request(id, capsule, kind, arrival=0.0, deadline=math.inf, paired_with=OTHER), 0.0
        )
        return id

    def _take(self, outputs: CoreOutputs, has_leases: bool) -> None:
        self.happened += outputs.reads
        self.happened += [message for _, message in outputs.messages]
        num_steps = sum(isinstance(each, str) for each in self.happened)
        self.sent += [(num_steps, frame.positions.tolist()) for frame in outputs.frames.values() if len(frame.tokens)]


class _Listed(SimulatedRunner):
    def __init__(self, happened: list) -> None:
        super().__init__(num_blocks=32, block_size=4)
        self._happened = happened

    def launch(self, step: StepInput) -> None:
        self._happened.append(f"step of {len(step.tokens.seq_lens)}")
        super().launch(step)


def test_blocks_that_were_announced_during_a_step_are_read_beside_the_next_one() -> None:
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20)
    rounds.core.from_producers.stream_up(OTHER, STREAM, 0.0)
    id = rounds.submit(2, Kind.CONSUME, max_tokens=4)
    rounds.round()
    assert rounds.happened == [Open(id, OTHER), "step of 1"]
    rounds.happened.clear()
    announcement = Announcement(id, 0, (5, 6, 7), (1, 1, 1), (FirstToken(id.handle, 9, None),))
    rounds.core.from_producers.message(STREAM, announcement, 0.0)
    rounds.round()
    read, step = rounds.happened
    assert isinstance(read, BlockRead)
    assert (read.source.tolist(), step) == ([5, 6, 7], "step of 1")
    rounds.happened.clear()
    rounds.core.read_ended(ReadEnd(read.read_id, np.ones(3, dtype=np.uint64)), 0.0)
    rounds.round()
    assert rounds.happened == [Release(id), "step of 2"]


def test_a_consumer_that_opens_during_a_step_is_answered_before_the_next_one() -> None:
    rounds = Rounds(PrefillScheduler(8), Kind.PRODUCE, max_tokens=4)
    rounds.round()
    assert rounds.happened == ["step of 1"]
    rounds.happened.clear()
    rounds.core.from_consumers.message(STREAM, Open(AttemptId(GATEWAY, 1), US), 0.0)
    rounds.round()
    first, step, second = rounds.happened
    assert isinstance(first, Announcement)
    assert isinstance(second, Announcement)
    assert (first.first_index, len(first.blocks), step, second.first_index) == (0, 2, "step of 1", 2)
    assert second.first_tokens


def test_tokens_leave_when_the_next_step_computes_and_the_last_ones_without_one() -> None:
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=3)
    for _ in range(3):
        rounds.round()
    assert rounds.happened == ["step of 1"] * 3
    assert rounds.sent == [(2, [12]), (3, [13])]
    rounds.round()
    assert rounds.sent == [(2, [12]), (3, [13]), (3, [14])]


def test_tokens_leave_before_a_pause_and_before_the_thread_ends() -> None:
    pause = Pause()
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20, decode_pause_s=pause)
    rounds.round()
    assert rounds.sent == []
    pause.lasts = True
    rounds.round()
    assert rounds.sent == [(1, [12])]
    pause.lasts = False
    rounds.round()
    rounds.thread.start()
    assert rounds.thread.stop(timeout_s=10)
    assert [position for _, positions in rounds.sent for position in positions] == list(
        range(12, 12 + len(rounds.sent))
    )
    assert len(rounds.sent) == sum(isinstance(each, str) for each in rounds.happened)


def test_tokens_leave_before_the_engine_waits_for_a_step_that_was_launched_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a pipeline: the last step is collected in a round that launches none."""
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=3, pipeline_depth=1)
    waited: list[int] = []
    collect = rounds.core.engine.runner.collect

    def collected() -> StepOutput:
        waited.append(sum(len(positions) for _, positions in rounds.sent))
        return collect()

    monkeypatch.setattr(rounds.core.engine.runner, "collect", collected)
    for _ in range(5):
        rounds.round()
    assert waited == [0, 1, 2]


def test_tokens_leave_although_the_step_after_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20)
    rounds.round()
    assert rounds.sent == []

    def fails(_step: StepInput) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rounds.core.engine.runner, "launch", fails)
    rounds.thread.start()
    assert rounds.thread.stop(timeout_s=10)
    assert rounds.sent == [(1, [12])]
    assert rounds.happened == ["step of 1", "the engine failed"]


class Pause:
    """A step that only decodes waits while it lasts."""

    def __init__(self) -> None:
        self.lasts = False

    def __call__(self) -> float:
        return 3600.0 if self.lasts else 0.0


def test_while_decoding_pauses_handoffs_go_on() -> None:
    pause = Pause()
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20, decode_pause_s=pause)
    rounds.core.from_producers.stream_up(OTHER, STREAM, 0.0)
    rounds.round()
    pause.lasts = True
    id = rounds.submit(2, Kind.CONSUME, max_tokens=4)
    rounds.round()
    assert rounds.happened == ["step of 1", Open(id, OTHER)]
    rounds.happened.clear()
    announcement = Announcement(id, 0, (5, 6, 7), (1, 1, 1), (FirstToken(id.handle, 9, None),))
    rounds.core.from_producers.message(STREAM, announcement, 0.0)
    rounds.round()
    (read,) = rounds.happened
    assert isinstance(read, BlockRead)
    rounds.core.read_ended(ReadEnd(read.read_id, np.ones(3, dtype=np.uint64)), 0.0)
    rounds.round()
    assert rounds.happened == [read, Release(id)]
    pause.lasts = False
    rounds.round()
    assert rounds.happened == [read, Release(id), "step of 2"]


def test_a_prompt_of_its_own_waits_for_no_pause_and_takes_what_decodes_along() -> None:
    pause = Pause()
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20, decode_pause_s=pause)
    rounds.round()
    pause.lasts = True
    rounds.submit(2, Kind.LOCAL, max_tokens=4)
    rounds.round()
    rounds.round()
    assert rounds.happened == ["step of 1", "step of 2"]


def test_a_thread_that_pauses_wakes_for_calls() -> None:
    pause = Pause()
    rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=20, decode_pause_s=pause)
    rounds.round()
    pause.lasts = True
    rounds.round()
    aborted = threading.Event()

    def abort(core: WorkerCore, now: float) -> None:
        core.from_gateways.abort(AttemptId(GATEWAY, 1), now)
        aborted.set()

    rounds.thread.start()
    rounds.thread.call(abort)
    assert aborted.wait(10)
    rounds.thread.stop()
    assert rounds.happened == ["step of 1"]
    assert rounds.core.idle


class Quarantined:
    """A worker of 32 blocks with reads of three blocks each in quarantine, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rounds = Rounds(DecodeScheduler(64), Kind.LOCAL, max_tokens=1, clock=lambda: self.now)
        self.rounds.core.from_producers.stream_up(OTHER, STREAM, self.now)

    def abandon_a_read(self, handle: int) -> int:
        rounds, core = self.rounds, self.rounds.core
        id = rounds.submit(handle, Kind.CONSUME, max_tokens=4)
        rounds.round()
        announcement = Announcement(id, 0, (5, 6, 7), (1, 1, 1), (FirstToken(id.handle, 9, None),))
        core.from_producers.message(STREAM, announcement, self.now)
        rounds.round()
        read = next(each for each in reversed(rounds.happened) if isinstance(each, BlockRead))
        core.from_gateways.abort(id, self.now)
        assert core.load().avoid == (OTHER,)
        return read.read_id

    def after(self, seconds: float) -> list[str]:
        """What it says once so much time has passed."""
        self.now += seconds
        self.rounds.happened.clear()
        self.rounds.round()
        return [each for each in self.rounds.happened if isinstance(each, str)]


def test_a_tenth_of_the_pool_in_quarantine_for_five_seconds_ends_the_worker() -> None:
    worker = Quarantined()
    for handle in (2, 3):
        worker.abandon_a_read(handle)
    assert worker.after(4.9) == []
    assert worker.after(0.2) == ["6 of 32 KV blocks are in quarantine, for more than 5 s: starting afresh"]


def test_reads_that_were_abandoned_just_now_do_not_count_for_the_tenth() -> None:
    """They are usually over within milliseconds, so an older one beside them must not make them fatal."""
    worker = Quarantined()
    worker.abandon_a_read(2)
    assert worker.after(100.0) == []
    latest = worker.abandon_a_read(3)
    assert worker.after(1.0) == []
    worker.rounds.core.read_ended(ReadEnd(latest, None), worker.now)
    assert worker.after(100.0) == []


def test_a_read_in_quarantine_for_ten_minutes_ends_the_worker() -> None:
    worker = Quarantined()
    worker.abandon_a_read(2)
    assert worker.after(599.9) == []
    assert worker.after(0.2) == ["KV blocks are in quarantine for more than 600 s: starting afresh"]


def test_reads_that_end_before_leave_the_worker_alone() -> None:
    worker = Quarantined()
    reads = [worker.abandon_a_read(handle) for handle in (2, 3)]
    assert worker.after(4.0) == []
    for read_id in reads:
        worker.rounds.core.read_ended(ReadEnd(read_id, None), worker.now)
    assert worker.after(700.0) == []
    assert worker.rounds.core.load().quarantined_blocks == 0
