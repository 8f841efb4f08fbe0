"""Priorities: lower ones are served sooner, the highest is preempted first, and nothing starves."""

from kvtransfer.ids import AttemptId
from services.config import Pooling
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.schedulers.priority import DUE_S
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from tests.engine.harness import GATEWAY, Driven, make_engine, reference


def order_of_first_tokens(driven: Driven) -> list[int]:
    driven.run()
    return list(driven.tokens)


def test_a_decode_worker_admits_by_priority_and_then_by_age():
    driven = make_engine(max_num_seqs=1)
    driven.submit([1, 2, 3], 8)
    driven.step()
    handles = [driven.submit([at, 5], 2, priority=priority) for at, priority in enumerate((0, 3, -1, 0, -1))]
    first, later, soonest, second, next_soonest = handles
    assert order_of_first_tokens(driven)[1:] == [soonest, next_soonest, first, second, later]


def test_a_prefill_worker_takes_a_long_prompt_before_a_short_one_of_lower_rank():
    driven = make_engine(max_num_seqs=1, scheduler=PrefillScheduler(16))
    driven.submit(list(range(40)), 1)
    driven.step()
    short, long = driven.submit([1, 2], 1), driven.submit(list(range(50, 90)), 1, priority=-1)
    assert order_of_first_tokens(driven)[1:] == [long, short]


def test_chunks_of_prompts_go_by_priority():
    driven = make_engine(scheduler=PrefillScheduler(8))
    plain, urgent = driven.submit(list(range(24)), 1), driven.submit(list(range(50, 80)), 1, priority=-1)
    assert order_of_first_tokens(driven) == [urgent, plain]


def test_a_request_that_waited_long_comes_before_urgent_ones():
    for scheduler in (DecodeScheduler(64), PrefillScheduler(64)):
        driven = make_engine(max_num_seqs=1, scheduler=scheduler)
        driven.submit(list(range(100)), 1)
        driven.step()
        patient = driven.submit([7, 8], 1, priority=9)
        driven.now += DUE_S
        urgent = driven.submit([5, 6], 1, priority=-9)
        assert order_of_first_tokens(driven)[1:] == [patient, urgent]


def test_the_sequence_of_the_highest_number_is_preempted():
    driven = make_engine(num_blocks=9, max_num_seqs=4)
    prompts = {
        driven.submit([at, at + 1, at + 2], 16, priority=priority): at for at, priority in ((1, 1), (5, 0), (9, 0))
    }
    preempted: set[AttemptId] = set()
    while driven.step():
        preempted |= {request.id for request in driven.engine.sequences.requests.in_state(State.PREEMPTED)}
    assert AttemptId(GATEWAY, min(prompts)) in preempted  # the oldest one, which would be the last without priorities
    for handle, at in prompts.items():
        assert driven.tokens[handle] == reference([at, at + 1, at + 2], 16)
    driven.assert_baseline()


def test_produced_prompts_have_priorities_too():
    driven = make_engine(max_num_seqs=1, scheduler=PrefillScheduler(64))
    driven.submit(list(range(100)), 5, kind=Kind.PRODUCE)
    driven.step()
    plain, urgent = (driven.submit([at, 2, 3], 5, kind=Kind.PRODUCE, priority=-at) for at in (0, 1))
    driven.run()
    assert [announced.id.handle for announced in driven.announced][-2:] == [urgent, plain]


def test_prompts_to_embed_have_priorities_too():
    driven = make_engine(max_num_seqs=1, scheduler=PrefillScheduler(64))
    driven.submit(list(range(100)), 1)
    driven.step()
    short, long = driven.embed([1, 2], Pooling.LAST), driven.embed(list(range(50, 90)), Pooling.LAST, priority=-1)
    driven.run()
    assert list(driven.embeddings) == [long, short]


def test_a_sequence_that_is_due_is_not_the_one_to_be_preempted():
    """Else it would lose its place to those that it passed, and compute its prompt again and again."""
    driven = make_engine(num_blocks=9, max_num_seqs=4)
    due = driven.submit([1, 2, 3], 16, priority=5)
    driven.step()
    driven.now += DUE_S
    for at in (5, 9):
        driven.submit([at, at + 1, at + 2], 16)
    preempted: set[AttemptId] = set()
    while driven.step():
        preempted |= {request.id for request in driven.engine.sequences.requests.in_state(State.PREEMPTED)}
    assert preempted
    assert AttemptId(GATEWAY, due) not in preempted
