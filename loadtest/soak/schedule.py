"""The faults of a run, drawn from its seed: their kinds, moments, victims and durations.

Every kind comes once in each deal of the cards, so none is left out by chance. After the first quarter of the run one
process of each role is spared restarts, so that its memory can be compared over the other three quarters; freezes and
partitions hit it as any other.
"""

import enum
import random
from dataclasses import dataclass

from loadtest.tcp_proxy import BOTH, Way

FAULTS_PER_MINUTE = 4.0
ROLES = ("prefill", "decode", "gateway")
SPARED = frozenset(f"{role}-1" for role in ROLES)
_FREEZE_S, _SILENCE_S, _DELAY_S = (1.0, 8.0), (1.0, 8.0), (4.0, 10.0)  # how long, least and most
_DELAYS_S = (0.03, 0.3)  # of each piece
_JITTER = 0.7  # of a slot, in which a fault may begin


class Kind(enum.StrEnum):
    """A way to disturb the stack."""

    KILL_PREFILL = "kill a prefill worker"
    KILL_DECODE = "kill a decode worker"
    KILL_GATEWAY = "kill a gateway"
    KILL_REDIS = "kill Redis"
    FREEZE_PREFILL = "freeze a prefill worker"
    FREEZE_DECODE = "freeze a decode worker"
    FREEZE_GATEWAY = "freeze a gateway"
    FREEZE_REDIS = "freeze Redis"
    SILENCE_GATEWAY = "gateway and worker silent, both ways"
    SILENCE_GATEWAY_ONE_WAY = "gateway and worker silent, one way"
    SILENCE_WORKERS = "prefill and decode silent, both ways"
    SILENCE_WORKERS_ONE_WAY = "prefill and decode silent, one way"
    DELAY_GATEWAY = "delay between gateway and worker"
    DELAY_WORKERS = "delay between prefill and decode"
    CUT_GATEWAY = "connections of gateway and worker reset"
    CUT_WORKERS = "connections of prefill and decode reset"
    DRAIN_WORKER = "baton drain of a worker"
    TERMINATE_WORKER = "SIGTERM to a worker"
    TERMINATE_GATEWAY = "SIGTERM to a gateway"
    ROLLING_RESTART = "every process restarted in turn"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at_s`: seconds after the first request.

    victims: processes that are killed, frozen or restarted, or the worker before which the network fails.
    client: for faults of the network, who is cut off from that worker. `ways`, `delay_s`: of these too.
    """

    at_s: float
    kind: Kind
    victims: tuple[str, ...]
    duration_s: float = 0.0
    client: str = ""
    ways: tuple[Way, ...] = BOTH
    delay_s: float = 0.0


def schedule(seed: int, minutes: float) -> list[Fault]:
    """Draws the faults of a run, in the order of their beginnings; the same for the same seed and minutes."""
    chance = random.Random(f"faults {seed}")
    number = max(1, round(FAULTS_PER_MINUTE * minutes))
    slot_s = 60 * minutes / number
    cards: list[Kind] = []
    while len(cards) < number:
        cards += chance.sample(list(Kind), len(Kind))
    faults = []
    for index, kind in enumerate(cards[:number]):
        at_s = slot_s * (index + chance.uniform(0, _JITTER))
        faults.append(_fault(chance, at_s, kind, spares=at_s > 15 * minutes))
    return faults


def _fault(chance: random.Random, at_s: float, kind: Kind, spares: bool) -> Fault:
    name = kind.name.lower()
    prefill, decode, gateway = (f"{role}-{chance.randrange(2)}" for role in ROLES)
    worker = chance.choice([prefill, decode])
    named = {"prefill": prefill, "decode": decode, "gateway": gateway, "redis": "redis", "worker": worker}
    what, _, whom = name.partition("_")
    if what in ("silence", "delay", "cut"):
        ways = (chance.choice(BOTH),) if name.endswith("one_way") else BOTH
        server, client = (prefill, decode) if whom.startswith("workers") else (worker, gateway)
        least, most = _DELAY_S if what == "delay" else _SILENCE_S
        delay_s = chance.uniform(*_DELAYS_S) if what == "delay" else 0.0
        return Fault(at_s, kind, (server,), chance.uniform(least, most), client, ways, delay_s)
    if what == "freeze":
        return Fault(at_s, kind, (named[whom],), chance.uniform(*_FREEZE_S))
    spared = SPARED if spares else frozenset[str]()
    if kind is Kind.ROLLING_RESTART:
        everybody = ["redis", *(f"{role}-{index}" for role in ROLES for index in range(2))]
        return Fault(at_s, kind, tuple(each for each in everybody if each not in spared))
    victim = named[whom]
    return Fault(at_s, kind, (victim.replace("-1", "-0") if victim in spared else victim,))
