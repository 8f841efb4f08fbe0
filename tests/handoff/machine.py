"""Hypothesis state machines over a world: one draws every move, the other whole stretches of moves.

The first shrinks to a readable story; the second gets further in the same time, as each stretch has its own weather
(what happens often in it, and what never; which prompts are asked for).
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtransfer.layer_groups import LayerGroups
from services.config import WorkerRole
from tests.handoff.processes import MAX_MODEL_LEN, Ask, Parts, Sizes
from tests.handoff.settling import run_fairly, settle
from tests.handoff.world import SHIPPED, World

_BASE = (1, 2, 3, 4, 5, 6, 7, 8, 9)
PROMPTS = (
    _BASE[:4],
    _BASE[:5],
    _BASE[:6],
    _BASE[:8],
    _BASE,
    (*_BASE[:4], 50, 51, 52),
    (*_BASE[:2], 60, 61, 62, 63),
    (70, 71),
    (5,),
)

_TOPOLOGIES = (("prefill", "decode-a"), ("prefill", "decode-a", "decode-b"), ("prefill-a", "prefill-b", "decode"))


def _that_fits(ask: Ask) -> Ask:
    return replace(ask, max_tokens=min(ask.max_tokens, MAX_MODEL_LEN - len(ask.prompt)))


_ASKS = st.builds(
    Ask,
    prompt=st.sampled_from(PROMPTS),
    max_tokens=st.integers(1, 5) | st.integers(6, 12),
    stop_token_at=st.sampled_from([None, None, None, 1, 2]),
    stop_string_at=st.sampled_from([None, None, None, 1, 2]),
    timeout_s=st.sampled_from([1000.0, 1000.0, 1000.0, 4.0]),
    alone=st.sampled_from([False, False, False, True]),
    turn=st.integers(0, 3),
    num_choices=st.sampled_from([1, 1, 2, 3]),
).map(_that_fits)
_WHICH = st.integers(0, 63)


# Events of a stretch, and how often they happen in fair weather.
_EVENTS = {
    "deliver": 30.0,
    "step": 18.0,
    "ask": 6.0,
    "land": 8.0,
    "end read": 5.0,
    "duplicate": 2.0,
    "notice": 3.0,
    "break": 1.0,
    "fail read": 2.0,
    "leave": 5.0,
    "connect": 3.0,
    "wait": 3.0,
    "prove dead": 0.5,
    "lose": 1.0,
    "kill": 0.3,
    "kill gateway": 0.1,
}
SLICES = LayerGroups((None, 5, 3), (((0,),), ((1,), (2,)), ((3,),)))  # groups of layers
_ALWAYS = ("deliver", "step", "ask")


class _WorldMachine(RuleBasedStateMachine):
    """Subclasses say of which parts the world is made, and what can happen in it."""

    parts: Parts = SHIPPED
    deepest = 1  # pipeline
    groups: LayerGroups | None = None  # of the model's layers
    of_ranks: WorkerRole | None = None  # workers of this role are groups of ranks

    @initialize(
        workers=st.sampled_from(_TOPOLOGIES),
        num_gateways=st.integers(1, 2),
        num_blocks=st.integers(7, 14),
        max_num_seqs=st.integers(2, 9),
        chunk=st.sampled_from([2, 4, 8]),
        depth=st.integers(0, 1),
    )
    def begin(
        self, workers: tuple[str, ...], num_gateways: int, num_blocks: int, max_num_seqs: int, chunk: int, depth: int
    ) -> None:
        """A world of some shape."""
        sizes = Sizes(num_blocks, max_num_seqs, chunk, min(depth, self.deepest), self.groups, self.of_ranks)
        self.world = World(workers, num_gateways=num_gateways, parts=self.parts, sizes=sizes)

    def teardown(self) -> None:
        """Without further faults everything ends, and nothing is held."""
        if hasattr(self, "world"):
            self.world.look_inside()  # first: a worker that is broken inside may never come to an end
            settle(self.world)


class StretchMachine(_WorldMachine):
    """Draws how each stretch goes."""

    @rule(seed=st.integers(0, 2**32 - 1), num_events=st.sampled_from([40, 80, 160]))
    def stretch(self, seed: int, num_events: int) -> None:
        """Many events, whose frequencies are drawn first."""
        choose = random.Random(seed)
        weather = {
            kind: weight * (1.0 if kind in _ALWAYS else choose.choice([0.0, 0.3, 1.0, 1.0, 3.0]))
            for kind, weight in _EVENTS.items()
        }
        popular = choose.choices(PROMPTS, k=choose.choice([1, 1, 2, 9]))
        for kind in choose.choices(list(weather), list(weather.values()), k=num_events):
            self._happen(kind, choose, popular)

    def _happen(self, kind: str, choose: random.Random, popular: Sequence[tuple[int, ...]]) -> None:
        world = self.world
        if kind == "ask":
            world.ask(_any_ask(choose, popular), choose.randrange(len(world.gateways)))
        elif kind == "wait":
            world.advance(choose.choice([0.05, 0.5, 1.0, 3.1, 6.0]))
        elif kind == "connect":
            world.connect()
        elif things := world.things(kind):
            choose.choice(things)()


class SlicesMachine(StretchMachine):
    """Stretches with a model whose layers have windows of 3 tokens, 5 and none."""

    groups = SLICES


class RanksMachine(StretchMachine):
    """Stretches with decode workers that are groups of ranks, each with a pool of its own."""

    of_ranks = WorkerRole.DECODE


class ProducingRanksMachine(SlicesMachine):
    """Stretches with prefill workers that are groups of ranks, and slices."""

    of_ranks = WorkerRole.PREFILL


def _any_ask(choose: random.Random, popular: Sequence[tuple[int, ...]]) -> Ask:
    first = choose.randrange(100, 900)
    unlike_others = tuple(range(first, first + choose.randint(1, 9)))
    ask = Ask(
        prompt=unlike_others if choose.random() < 0.2 else choose.choice(popular),
        max_tokens=choose.choice([choose.randint(1, 5), choose.randint(6, 12)]),
        stop_token_at=choose.choice([None, None, None, None, 1, 2]),
        stop_string_at=choose.choice([None, None, None, None, 1, 2]),
        timeout_s=choose.choice([1000.0, 1000.0, 1000.0, 1000.0, 4.0]),
        alone=choose.random() < 0.4,
        turn=choose.randrange(4),
        num_choices=choose.choice([1, 2, 3]),
    )
    return _that_fits(ask)


class HandoffMachine(_WorldMachine):
    """Draws every move."""

    def _happen(self, kind: str, which: int) -> None:
        if things := self.world.things(kind):
            things[which % len(things)]()

    @rule(asks=st.lists(_ASKS, min_size=1, max_size=3), alike=st.booleans(), gateway=st.integers(0, 1))
    def ask(self, asks: list[Ask], alike: bool, gateway: int) -> None:
        """Clients come, with the same prompt or each with its own."""
        for ask in asks:
            one = _that_fits(replace(ask, prompt=asks[0].prompt)) if alike else ask
            self.world.ask(one, gateway % len(self.world.gateways))

    @rule(which=st.lists(_WHICH, min_size=1, max_size=8))
    def deliver(self, which: list[int]) -> None:
        """Some messages arrive, whichever."""
        for each in which:
            self._happen("deliver", each)

    @rule(which=_WHICH, steps=st.integers(1, 3))
    def step(self, which: int, steps: int) -> None:
        """A worker computes."""
        for _ in range(steps):
            self._happen("step", which)

    @rule(rounds=st.integers(1, 3))
    def go_on(self, rounds: int) -> None:
        """Everything goes on for a while."""
        run_fairly(self.world, rounds)

    @rule(which=_WHICH)
    def land(self, which: int) -> None:
        """A block of a read lands."""
        self._happen("land", which)

    @rule(which=_WHICH)
    def end_read(self, which: int) -> None:
        """A read whose data landed is over."""
        self._happen("end read", which)

    @rule(which=_WHICH)
    def fail_read(self, which: int) -> None:
        """A read fails."""
        self._happen("fail read", which)

    @rule(which=_WHICH)
    def duplicate(self, which: int) -> None:
        """A message comes again, later."""
        self._happen("duplicate", which)

    @rule(which=_WHICH)
    def break_stream(self, which: int) -> None:
        """A stream breaks."""
        self._happen("break", which)

    @rule(which=_WHICH)
    def notice(self, which: int) -> None:
        """An end of a broken stream notices."""
        self._happen("notice", which)

    @rule()
    def connect(self) -> None:
        """Streams are opened again."""
        self.world.connect()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.1, 6.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.world.advance(seconds)

    @rule(which=_WHICH)
    def leave(self, which: int) -> None:
        """A client goes away."""
        self._happen("leave", which)

    @precondition(lambda self: len(self.world.lives) < 6)
    @rule(which=_WHICH)
    def kill_worker(self, which: int) -> None:
        """A worker dies and starts again."""
        self._happen("kill", which)

    @rule(which=_WHICH)
    def prove_dead(self, which: int) -> None:
        """A consumer learns which producers are dead."""
        self._happen("prove dead", which)

    @rule(which=_WHICH)
    def lose(self, which: int) -> None:
        """A consumer cannot reach a producer that it reads from."""
        self._happen("lose", which)

    @precondition(lambda self: not self.world.dead_gateways)
    @rule(which=_WHICH)
    def kill_gateway(self, which: int) -> None:
        """A gateway dies and starts again."""
        self._happen("kill gateway", which)


def search(max_examples: int, num_steps: int) -> settings:
    """A short search that is the same each time, and shrinks nothing."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=num_steps,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
