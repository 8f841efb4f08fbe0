"""Routing is a pure function: what is known goes in, a plan comes out."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import WorkerId
from services.config import HandoffMode, WorkerRole
from services.gateway.dispatch.decision import Decision
from services.gateway.dispatch.router import (
    TRIAL_EVERY,
    Candidate,
    Demand,
    Figures,
    Line,
    NoPlan,
    Plan,
    Policy,
    Why,
    make_plan,
    uncached_tokens,
)
from services.protocol.frames import Load

ALWAYS, NEVER, AUTO = HandoffMode.ALWAYS, HandoffMode.NEVER, HandoffMode.AUTO
IDLE = Load(available_blocks=1000)
EMBEDS = frozenset({"embeddings"})


def worker(id: int, role: WorkerRole, load: Load = IDLE, **changes: Any) -> Candidate:
    plain = Candidate(
        id=WorkerId(id),
        address=f"w{id}:1",
        role=role,
        pairs_by=("f", 1),
        transports=frozenset({"nixl", "grpc"}),
        block_size=16,
        num_blocks=1000,
        max_model_len=100_000,
        load=load,
    )
    return replace(plain, **changes)


def prefill(id: int, load: Load = IDLE, **changes: Any) -> Candidate:
    return worker(id, WorkerRole.PREFILL, load, **changes)


def decode(id: int, load: Load = IDLE, **changes: Any) -> Candidate:
    return worker(id, WorkerRole.DECODE, load, **changes)


def plan(
    *candidates: Candidate,
    mode: HandoffMode = ALWAYS,
    threshold: int | None = 100,
    turn: int = 0,
    figures: Figures | None = None,
    **demand: Any,
) -> Any:
    wanted = Demand(**{"num_tokens": 200, **demand})
    return make_plan(candidates, wanted, Policy(mode, threshold), turn, figures or Figures())


def ids(made: Plan | NoPlan) -> tuple[int | None, int | None]:
    assert isinstance(made, Plan), made
    return made.prefill.id if made.prefill else None, made.decode.id if made.decode else None


def test_always_takes_a_pair():
    assert ids(plan(prefill(1), decode(2))) == (1, 2)


def test_embeddings_are_made_by_workers_that_can_in_every_mode():
    for mode in HandoffMode:
        made = plan(prefill(1), prefill(2, knows=EMBEDS), decode(3), mode=mode, needs=EMBEDS)
        assert ids(made) == (2, None)
        assert made.why is Why.EMBEDDING
        assert plan(prefill(1), decode(2), mode=mode, needs=EMBEDS) is NoPlan.NO_WORKER
    assert ids(plan(prefill(1, depth=5, knows=EMBEDS), prefill(2, depth=9, knows=EMBEDS), needs=EMBEDS)) == (2, None)


def test_a_prompt_to_embed_needs_no_room_for_a_token():
    full = prefill(1, max_model_len=200, knows=EMBEDS)
    assert ids(plan(full, needs=EMBEDS)) == (1, None)
    assert plan(full, num_tokens=201, needs=EMBEDS) is NoPlan.TOO_LARGE
    assert plan(prefill(1, num_blocks=12, knows=EMBEDS), needs=EMBEDS) is NoPlan.TOO_LARGE


def test_a_prompt_to_embed_waits_for_a_worker_that_refused_it_or_is_ready_for_suspects():
    worker_1 = prefill(1, knows=EMBEDS)
    assert plan(worker_1, avoid=frozenset({WorkerId(1)}), needs=EMBEDS) is NoPlan.NOT_NOW
    assert plan(replace(worker_1, unproven=1), suspect=True, needs=EMBEDS) is NoPlan.NOT_NOW
    assert ids(plan(worker_1, decode(2), suspect=True, needs=EMBEDS)) == (1, None)


def test_never_leaves_it_all_to_decode():
    assert ids(plan(prefill(1), decode(2), mode=NEVER)) == (None, 2)


def test_always_without_a_prefill_worker_is_decode_alone():
    assert ids(plan(decode(2))) == (None, 2)


@pytest.mark.parametrize(("depth", "expected"), [(6, (1, 2)), (7, (None, 2))])
def test_auto_splits_when_more_than_the_threshold_is_not_cached_at_decode(depth: int, expected: Any):
    assert ids(plan(prefill(1), decode(2, depth=depth), mode=AUTO)) == expected


# As learned where both roles are equally fast, 1 ms a token, and a handoff takes 20 ms.
EQUAL = Figures(prefill=Line(0.01, 0.001), alone=Line(0.01, 0.001), handoff=Line(0.02, 0.0), shared=0.0)
BUSY = Load(running=8, available_blocks=1000)


def auto(*workers: Candidate, figures: Figures = EQUAL, **demand: Any) -> Plan:
    made = plan(*workers, mode=AUTO, threshold=None, figures=figures, **demand)
    assert isinstance(made, Plan)
    return made


def test_auto_spares_a_decode_worker_that_generates_a_long_prompt():
    made = auto(prefill(1), decode(2, BUSY))
    assert (ids(made), made.why) == ((1, 2), Why.SOONER)
    assert made.pair_s == pytest.approx(0.01 + 0.2 + 0.02)
    assert made.alone_s == pytest.approx(0.01 + 0.2 * 9)


def test_auto_leaves_a_prompt_to_a_decode_worker_that_has_nothing_to_do():
    """The prompt would wait longer with a handoff, and nobody else waits."""
    assert ids(auto(prefill(1), decode(2))) == (None, 2)


def test_auto_computes_a_short_rest_where_the_others_wait_less_than_a_handoff_takes():
    nearly_cached = decode(2, Load(running=1, available_blocks=1000), depth=11)
    assert ids(auto(prefill(1), nearly_cached, num_tokens=195)) == (None, 2)
    assert ids(auto(prefill(1), decode(2, Load(running=1, available_blocks=1000)), num_tokens=195)) == (1, 2)


def test_a_session_stays_with_its_worker_while_that_is_not_overloaded():
    others = prefill(1), decode(2), decode(3)
    for turn in range(2):
        assert ids(plan(*others, turn=turn, stays_with=WorkerId(3))) == (1, 3)
        assert ids(plan(*others[:2], turn=turn, stays_with=WorkerId(3))) == (1, 2)
    behind, too_far = (Load(running=running, available_blocks=1000) for running in (128, 129))
    assert ids(plan(prefill(1), decode(2), decode(3, behind), stays_with=WorkerId(3))) == (1, 3)
    assert ids(plan(prefill(1), decode(2), decode(3, too_far), stays_with=WorkerId(3))) == (1, 2)
    full = Load(running=1, waiting=1, available_blocks=1000)
    assert ids(plan(prefill(1), decode(2), decode(3, full), stays_with=WorkerId(3))) == (1, 2)
    draining = Load(available_blocks=1000, draining=True)
    assert ids(plan(prefill(1), decode(2), decode(3, draining), stays_with=WorkerId(3))) == (1, 2)
    failed = frozenset({(WorkerId(1), WorkerId(3))})
    assert ids(plan(prefill(1), decode(2), decode(3), stays_with=WorkerId(3), avoid_pairs=failed)) == (1, 2)


def test_a_worker_that_a_session_passes_over_is_told_apart():
    workers, demand = [decode(2), decode(3, BUSY)], Demand(num_tokens=200, stays_with=WorkerId(3))
    made = make_plan(workers, demand, Policy(NEVER), 0)
    assert isinstance(made, Plan)
    described = Decision(workers, demand, made).describe()["candidates"]
    assert isinstance(described, list)
    assert [each["verdict"] for each in described] == ["its session is at the other worker", "chosen"]


def test_only_workers_that_know_what_the_request_needs_get_it():
    knows = frozenset({"cache_salt"})
    old, new = (prefill(1), decode(2)), (prefill(3, knows=knows), decode(4, knows=knows))
    assert ids(plan(*old, *new, needs=knows)) == (3, 4)
    assert plan(*old, needs=knows) is NoPlan.NO_WORKER
    assert ids(plan(*old, needs=frozenset())) == (1, 2)


def test_auto_with_all_but_a_block_cached_needs_no_figures():
    made = auto(prefill(1), decode(2, BUSY, depth=12), figures=Figures())
    assert (ids(made), made.why) == ((None, 2), Why.CACHED)


def test_auto_waits_in_the_shorter_queue():
    assert ids(auto(prefill(1), decode(2, queued_tokens=500, assigned=3))) == (1, 2)
    assert ids(auto(prefill(1, queued_tokens=500), decode(2))) == (None, 2)


@pytest.mark.parametrize("waiting", [0, 1, 5, 40])
@pytest.mark.parametrize("running", [0, 1, 8, 40])
def test_auto_hands_nothing_off_where_prefill_takes_the_cores_that_decode_would_use(waiting: int, running: int):
    """Two workers on two cores: whoever computes, the others lose as much, and a handoff comes on top."""
    shared = replace(EQUAL, shared=0.5)
    load = Load(running=running, available_blocks=1000)
    queue: dict[str, int] = {"queued_tokens": 200 * waiting, "assigned": waiting + running, "generating": running}
    beside, elsewhere = decode(2, load, address="h:2", **queue), decode(2, load, address="other:2", **queue)
    assert ids(auto(prefill(1, address="h:1"), beside, figures=shared)) == (None, 2)
    assert auto(prefill(1, address="h:1"), elsewhere, figures=shared).split == (waiting + running > 0)


def test_auto_takes_workers_of_one_host_to_share_it_until_it_knows():
    unknown = replace(EQUAL, shared=None)
    assert ids(auto(prefill(1, address="h:1"), decode(2, BUSY, address="h:2"), figures=unknown)) == (None, 2)
    assert ids(auto(prefill(1, address="h:1"), decode(2, BUSY, address="i:2"), figures=unknown)) == (1, 2)


def test_auto_tries_both_until_it_knows_something():
    made = [auto(prefill(1), decode(2), figures=Figures(), turn=turn) for turn in range(4)]
    assert [(one.split, one.why) for one in made] == [(True, Why.TRIAL), (False, Why.TRIAL)] * 2


def test_auto_tries_the_worse_plan_now_and_then_unless_it_is_far_worse():
    def split(decode_worker: Candidate) -> list[bool]:
        return [auto(prefill(1), decode_worker, turn=turn).split for turn in range(2 * TRIAL_EVERY)]

    assert split(decode(2)).count(True) == 2
    assert all(split(decode(2, BUSY)))


def test_the_last_token_is_never_cached():
    """As a worker's own cache has it: a hit covers at most the blocks before the last token."""
    assert uncached_tokens(decode(1, depth=2), 32) == 16
    assert uncached_tokens(decode(1, depth=2), 33) == 1


def test_a_longer_cached_prefix_wins():
    made = plan(prefill(1, depth=2), prefill(3, depth=5), decode(2), decode(4, depth=1))
    assert ids(made) == (3, 4)


def test_a_cached_prefix_is_weighed_against_the_queue():
    busy = Load(waiting_tokens=1000, available_blocks=1000)
    assert ids(plan(prefill(1, busy, depth=12), prefill(3), decode(2))) == (3, 2)


def test_what_this_gateway_sent_counts_before_the_worker_says_so():
    assert ids(plan(prefill(1, queued_tokens=50), prefill(3), decode(2, assigned=1), decode(4))) == (3, 4)


def test_a_full_pool_counts_against_a_worker():
    full = Load(available_blocks=0)
    assert ids(plan(decode(2, full), decode(4, Load(running=3, available_blocks=1000)))) == (None, 4)


def test_equals_take_turns():
    workers = [prefill(1), prefill(3), decode(2), decode(4)]
    assert [ids(plan(*workers, turn=turn)) for turn in range(3)] == [(1, 2), (3, 4), (1, 2)]


@pytest.mark.parametrize(
    "other", [{"pairs_by": ("g", 1)}, {"pairs_by": ("f", 2)}, {"transports": frozenset({"memory"})}]
)
def test_workers_that_differ_never_pair(other: dict[str, Any]):
    assert ids(plan(prefill(1, **other), decode(2))) == (None, 2)
    assert ids(plan(prefill(1, **other), prefill(3, IDLE, queued_tokens=900), decode(2))) == (3, 2)


def test_one_transport_in_common_is_enough_to_pair():
    only_grpc = frozenset({"grpc"})
    assert ids(plan(prefill(1), decode(2, transports=only_grpc))) == (1, 2)
    assert ids(plan(prefill(1, transports=frozenset({"nixl"})), decode(2, transports=only_grpc))) == (None, 2)


def test_a_pair_that_the_consumer_wants_to_avoid_is_not_made():
    wary = Load(avoid=(WorkerId(1),), available_blocks=1000)
    assert ids(plan(prefill(1), decode(2, wary))) == (None, 2)
    assert ids(plan(prefill(1), decode(2, wary), decode(4, Load(running=9, available_blocks=1000)))) == (1, 4)


@pytest.mark.parametrize("mode", [ALWAYS, AUTO])
def test_one_token_goes_to_prefill_alone(mode: HandoffMode):
    assert ids(plan(prefill(1), decode(2), mode=mode, one_token=True)) == (1, None)


def test_one_token_goes_to_prefill_when_no_decode_worker_is_there():
    assert ids(plan(prefill(1), decode(2), mode=NEVER, one_token=True)) == (None, 2)
    assert ids(plan(prefill(1), mode=NEVER, one_token=True)) == (1, None)


def test_more_tokens_need_a_decode_worker():
    assert plan(prefill(1)) is NoPlan.NO_WORKER
    assert plan() is NoPlan.NO_WORKER


def test_a_pool_that_is_too_small_for_the_prompt_is_no_candidate():
    assert plan(decode(2, num_blocks=12)) is NoPlan.TOO_LARGE
    assert ids(plan(decode(2, num_blocks=13))) == (None, 2)
    assert ids(plan(decode(2, num_blocks=13), num_tokens=207)) == (None, 2)
    assert plan(decode(2, num_blocks=13), num_tokens=208) is NoPlan.TOO_LARGE, "the next position needs room too"


def test_a_prefill_pool_that_is_too_small_leaves_the_prompt_to_decode():
    assert ids(plan(prefill(1, num_blocks=5), decode(2))) == (None, 2)


def test_after_too_large_only_a_larger_worker_will_do():
    too_small = frozenset({(50, 100_000)})
    assert plan(decode(2, num_blocks=50), too_small=too_small) is NoPlan.TOO_LARGE
    assert ids(plan(decode(2, num_blocks=50), decode(4, num_blocks=51), too_small=too_small)) == (None, 4)


def test_a_pool_of_the_same_size_takes_longer_sequences_where_its_limit_is_higher():
    too_small = frozenset({(50, 300)})
    assert plan(decode(2, num_blocks=50, max_model_len=300), too_small=too_small) is NoPlan.TOO_LARGE
    assert ids(plan(decode(2, num_blocks=50, max_model_len=301), too_small=too_small)) == (None, 2)


def test_a_prompt_is_sent_to_no_worker_whose_sequences_are_shorter():
    assert plan(decode(2, max_model_len=200)) is NoPlan.TOO_LARGE
    assert ids(plan(decode(2, max_model_len=201))) == (None, 2)


def test_a_pair_that_failed_is_not_made():
    workers = prefill(1), prefill(3), decode(2)
    failed = (WorkerId(1), WorkerId(2)), (WorkerId(3), WorkerId(2))
    assert ids(plan(*workers, avoid_pairs=frozenset(failed[:1]))) == (3, 2)
    assert ids(plan(*workers, avoid_pairs=frozenset(failed))) == (None, 2)


def test_a_suspect_is_computed_where_nothing_else_is_unproven():
    workers = prefill(1), decode(2, unproven=1), decode(4)
    assert ids(plan(*workers, suspect=True)) == (None, 4)
    assert plan(*workers[:2], suspect=True) is NoPlan.NOT_NOW


def test_a_suspect_is_sent_to_no_worker_that_may_be_dead_already():
    assert plan(decode(2, outlives_others=False), suspect=True) is NoPlan.NOT_NOW
    assert ids(plan(decode(2, outlives_others=False), decode(4), suspect=True)) == (None, 4)


def test_nothing_joins_a_suspect_or_goes_where_one_waits_to_be():
    assert ids(plan(decode(2, suspects=1), decode(4))) == (None, 4)
    assert plan(decode(2, suspects=1)) is NoPlan.NOT_NOW
    assert plan(decode(2), kept=frozenset({WorkerId(2)})) is NoPlan.NOT_NOW
    assert ids(plan(decode(2), kept=frozenset({WorkerId(2)}), suspect=True)) == (None, 2)


def test_a_worker_that_refused_just_now_is_left_alone():
    refused = frozenset({WorkerId(2)})
    assert ids(plan(decode(2), decode(4), avoid=refused)) == (None, 4)
    assert plan(decode(2), avoid=refused) is NoPlan.NOT_NOW
    assert ids(plan(prefill(1), decode(4), avoid=frozenset({WorkerId(1)}))) == (None, 4)


LOADS = st.builds(
    Load,
    running=st.integers(0, 50),
    waiting_tokens=st.integers(0, 500),
    available_blocks=st.integers(0, 40),
    avoid=st.lists(st.integers(0, 5), max_size=2).map(tuple),
)
WORKERS = st.lists(
    st.builds(
        lambda role, load, depth, kind: (role, load, depth, kind),
        st.sampled_from(WorkerRole),
        LOADS,
        st.integers(0, 20),
        st.sampled_from("fg"),
    ),
    max_size=6,
).map(
    lambda drawn: [
        worker(id, role, load, depth=depth, pairs_by=(kind, 1)) for id, (role, load, depth, kind) in enumerate(drawn)
    ]
)


@settings(deadline=None)
@given(
    WORKERS,
    st.sampled_from(HandoffMode),
    st.sampled_from([None, 100]),
    st.sampled_from([Figures(), EQUAL, replace(EQUAL, shared=0.9)]),
    st.integers(1, 400),
    st.booleans(),
    st.integers(0, 130),
)
def test_any_plan_keeps_the_rules(
    workers: list[Candidate],
    mode: HandoffMode,
    threshold: int | None,
    figures: Figures,
    tokens: int,
    one_token: bool,
    turn: int,
) -> None:
    asked: Any = {"mode": mode, "threshold": threshold, "figures": figures, "num_tokens": tokens, "turn": turn}
    made = plan(*workers, one_token=one_token, **asked)
    assert made == plan(*workers, one_token=one_token, **asked)
    has_decode = any(candidate.role is WorkerRole.DECODE for candidate in workers)
    if isinstance(made, NoPlan):
        assert made is NoPlan.NO_WORKER
        assert not has_decode
        return
    assert made.prefill is None or made.prefill.role is WorkerRole.PREFILL
    assert made.decode is None or made.decode.role is WorkerRole.DECODE
    assert made.decode is not None or one_token
    if made.prefill is not None and made.decode is not None:
        assert mode is not NEVER
        assert made.prefill.pairs_by == made.decode.pairs_by
        assert made.prefill.id not in made.decode.load.avoid


def test_what_a_gateway_gave_a_worker_and_the_worker_reports_counts_once():
    """Several gateways share the workers: each counts its own requests, and hears of all of them."""
    reported = Load(running=4, waiting_tokens=300, available_blocks=1000)
    for mine in (
        decode(2, reported, assigned=4, generating=4, queued_tokens=300),  # all of it this gateway's
        decode(2, reported),  # all of it another one's
    ):
        busier = decode(3, replace(reported, running=5), assigned=5, generating=5, queued_tokens=300)
        idler = decode(3, replace(reported, running=3), assigned=3, generating=3, queued_tokens=300)
        assert ids(plan(mine, busier, mode=HandoffMode.NEVER)) == (None, 2)
        assert ids(plan(mine, idler, mode=HandoffMode.NEVER)) == (None, 3)
