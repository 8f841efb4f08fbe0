"""Random interleavings over the shipped classes: messages, losses, duplicates, restarts, aborts, resets, time.

Longer searches: see conftest.py.
"""

import random

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvtransfer.layer_groups import LayerGroups
from tests.handoff import schedules
from tests.handoff.machine import (
    PROMPTS,
    SLICES,
    HandoffMachine,
    ProducingRanksMachine,
    RanksMachine,
    SlicesMachine,
    StretchMachine,
    search,
)
from tests.handoff.processes import Ask, Sizes
from tests.handoff.settling import settle
from tests.handoff.wires import Break
from tests.handoff.world import SHIPPED, World


@pytest.mark.parametrize(
    ("machine", "num_examples", "num_steps"),
    [
        pytest.param(HandoffMachine, 25, 40, id="moves"),
        pytest.param(StretchMachine, 25, 3, id="stretches"),
        pytest.param(SlicesMachine, 10, 3, id="slices"),
        pytest.param(RanksMachine, 5, 3, id="ranks"),
        pytest.param(ProducingRanksMachine, 40, 3, id="producing ranks, slices", marks=pytest.mark.long),
    ],
)
def test_no_interleaving_breaks_the_handoff(
    machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int
) -> None:
    """No wrong, lost or repeated token, no block leaked, freed twice or used under a read; every request ends."""
    named = settings.get_current_profile_name() == "handoff-long"
    run_state_machine_as_test(machine, settings=settings() if named else search(num_examples, num_steps))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("groups", [None, SLICES])
def test_without_faults_all_complete_in_tiny_pools(groups: LayerGroups | None, seed: int, depth: int) -> None:
    """Prompts that share prefixes, more than fit at once, in any order of events: no deadlock, no failure."""
    choose = random.Random(seed)
    world = World(num_gateways=2, sizes=Sizes(7, 3, choose.choice([2, 4]), depth, groups))
    for turn in range(12):
        prompt = choose.choice(PROMPTS)
        world.ask(Ask(prompt, choose.randint(1, 5), alone=choose.random() < 0.2, turn=turn), gateway=turn % 2)
        for _ in range(10):
            if things := world.things(choose.choice(["deliver", "deliver", "deliver", "step", "land", "end read"])):
                choose.choice(things)()
    settle(world, must_complete=True)


def test_reads_of_a_lost_gateways_requests_stay_in_quarantine_until_they_end() -> None:
    """A gateway's stream breaks while KV for it is being read: those blocks wait for the data."""
    world = schedules.pair(SHIPPED)
    world.ask(Ask(schedules.LONG, 4))
    schedules.post_reads(world)
    decode = world.workers["decode"]
    world.break_stream(schedules.gateway_stream(world, "decode"), Break.FAR)
    assert decode.core.engine.sequences.tables.num_quarantined == 5
    schedules.land_all(world)
    assert decode.core.engine.sequences.tables.num_quarantined == 0
    settle(world)
