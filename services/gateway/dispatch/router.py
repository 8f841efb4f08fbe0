"""Which workers a request goes to: a pure function of what is known of them.

A worker's cost is the prompt tokens that it would compute or fetch for this request, plus those queued there already,
plus what its running sequences are worth in the same coin, plus the tokens for which it has no free block. The
cheapest wins; between equals the turn decides. The costs of a pair's two sides do not depend on each other, so the
best pair is found without trying all of them.

Whether the best pair or the best decode worker alone gets the request is, in automatic mode, a question of time: of
what this request will wait, and of what it makes others wait. Computing a prompt on a decode worker holds up all that
generate there. A prefill worker on the same host takes cores from them as well, but no more than it shares, and a
handoff takes time of its own. All that is known of these is in `Figures`, which costs.py learns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from kvtransfer.ids import WorkerId
from services.config import HandoffMode, WorkerRole
from services.protocol.frames import Load

# What one running sequence weighs against prompt tokens still to be computed. A decode step handles one token of each
# running sequence, so a sequence delays a newcomer by about as much as a small piece of a prompt.
SEQUENCE_COST = 16

# In automatic mode one request in so many takes the plan that looks worse, so that it stays known what that costs;
# unless it looks far worse.
TRIAL_EVERY = 64
_TRIAL_LIMIT = 3.0
# The share of its cores that a decode worker loses to a busy prefill worker of its host, until it was seen.
_SHARED_AT_FIRST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live worker, as it looks to one request."""

    id: WorkerId
    address: str
    role: WorkerRole
    pairs_by: tuple[str, int]  # fingerprint, kv protocol: equal ones can hand over to each other ...
    transports: frozenset[str]  # ... if they have one of these in common
    block_size: int
    num_blocks: int
    load: Load
    depth: int = 0  # leading blocks of this prompt in its cache
    queued_tokens: int = 0  # sent there by this gateway, without an answer so far
    assigned: int = 0  # attempts of this gateway that it generates for, or will
    generating: int = 0  # those of them for which it has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs of its workers."""

    num_tokens: int  # to be in KV before the next token
    one_token: bool = False  # it ends with the next token
    larger_than: int = 0  # blocks of a worker that was too small for it
    avoid: frozenset[WorkerId] = frozenset()  # workers that refused it just now


@dataclass(frozen=True, slots=True)
class Policy:
    """When a request is split."""

    handoff: HandoffMode
    threshold: int | None = None  # for HandoffMode.AUTO: uncached tokens at the decode worker; None: by what is learned


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds for a number of tokens."""

    base_s: float
    per_token_s: float

    def at(self, tokens: float) -> float:
        """In seconds."""
        return self.base_s + self.per_token_s * tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """What plans were seen to cost. None: not known so far."""

    prefill: Line | None = None  # to the first token at a prefill worker, by tokens to compute
    alone: Line | None = None  # the same at a decode worker without a handoff
    handoff: Line | None = None  # from the first token to the second, beyond a step, by tokens to fetch
    shared: float | None = None  # of a decode worker's time, lost to a busy prefill worker of its host; 0 to 1


class Why(StrEnum):
    """What decided between a pair and a decode worker alone."""

    FORCED = "forced"  # the policy has no choice
    NO_PAIR = "no pair"  # none is there, or none can pair
    ONE_TOKEN = "one token"  # nothing would be left to do after a handoff
    CACHED = "cached"  # all but a block is in decode's cache
    THRESHOLD = "threshold"  # the policy's own
    TRIAL = "trial"  # to learn what it costs
    SOONER = "sooner"  # less waiting, its own and others'


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to send a request: to a pair, or to one worker alone."""

    prefill: Candidate | None
    decode: Candidate | None
    why: Why = Why.FORCED
    pair_s: float | None = None  # what was expected of a pair, and of a decode worker alone, where that was asked
    alone_s: float | None = None

    @property
    def split(self) -> bool:
        """True when KV is to be handed over."""
        return self.prefill is not None and self.decode is not None

    def workers(self) -> list[Candidate]:
        """All that are sent the request."""
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    @property
    def computes(self) -> Candidate:
        """The worker that computes the prompt."""
        worker = self.prefill or self.decode
        assert worker is not None
        return worker

    @property
    def generates(self) -> Candidate:
        """The worker that generates the rest."""
        worker = self.decode or self.prefill
        assert worker is not None
        return worker


_NOTHING_KNOWN = Figures()


class NoPlan(Enum):
    """Why a request goes nowhere."""

    NO_WORKER = "no worker that can run it is connected"
    TOO_LARGE = "it fits no worker that is connected"
    NOT_NOW = "every worker that could run it refused it just now"


def make_plan(
    candidates: Iterable[Candidate], demand: Demand, policy: Policy, turn: int, figures: Figures = _NOTHING_KNOWN
) -> Plan | NoPlan:
    """The cheapest plan that the policy allows, or why there is none. `turn` rotates between equals."""
    able = [worker for worker in candidates if worker.role is WorkerRole.DECODE or _may_prefill(demand, policy)]
    fitting = [worker for worker in able if _fits(worker, demand)]
    ready = [worker for worker in fitting if worker.id not in demand.avoid]
    prefills = _by_cost((worker for worker in ready if worker.role is WorkerRole.PREFILL), demand, turn)
    decodes = _by_cost((worker for worker in ready if worker.role is WorkerRole.DECODE), demand, turn)
    if demand.one_token and prefills and (policy.handoff is not HandoffMode.NEVER or not decodes):
        return Plan(prefills[0], None, Why.ONE_TOKEN)
    if decodes:
        pair = None if policy.handoff is HandoffMode.NEVER else _best_pair(prefills, decodes, demand)
        alone = Plan(None, decodes[0], Why.FORCED if policy.handoff is HandoffMode.NEVER else Why.NO_PAIR)
        if pair is None or policy.handoff is HandoffMode.ALWAYS:
            return pair or alone
        return _pair_or_alone(pair, alone, demand, policy, figures, turn)
    return _why_not(able, fitting, demand)


def uncached_tokens(worker: Candidate, num_tokens: int) -> int:
    """Tokens of a prompt that this worker does not hold. The last token is always computed."""
    full_blocks = (num_tokens - 1) // worker.block_size
    return num_tokens - min(worker.depth, full_blocks) * worker.block_size


def _may_prefill(demand: Demand, policy: Policy) -> bool:
    return demand.one_token or policy.handoff is not HandoffMode.NEVER


def _fits(worker: Candidate, demand: Demand) -> bool:
    tokens = demand.num_tokens + (worker.role is WorkerRole.DECODE)  # decode holds the next position too
    needed = -(-tokens // worker.block_size)
    return worker.num_blocks >= needed and worker.num_blocks > demand.larger_than


def _by_cost(workers: Iterable[Candidate], demand: Demand, turn: int) -> list[Candidate]:
    rotated = sorted(workers, key=lambda worker: worker.id)
    if rotated:
        at = turn % len(rotated)
        rotated = rotated[at:] + rotated[:at]
    return sorted(rotated, key=lambda worker: _cost(worker, demand.num_tokens))


def _cost(worker: Candidate, num_tokens: int) -> int:
    sequences = max(worker.load.running + worker.load.waiting, worker.assigned)
    uncached = uncached_tokens(worker, num_tokens)
    missing = max(0, uncached - worker.load.available_blocks * worker.block_size)
    return uncached + _queued(worker) + sequences * SEQUENCE_COST + missing


def _pair_or_alone(pair: Plan, alone: Plan, demand: Demand, policy: Policy, figures: Figures, turn: int) -> Plan:
    decode = alone.generates
    uncached = uncached_tokens(decode, demand.num_tokens)
    if policy.threshold is not None:
        return replace(pair if uncached > policy.threshold else alone, why=Why.THRESHOLD)
    if uncached <= decode.block_size:
        return replace(alone, why=Why.CACHED)
    pair_s, alone_s = _pair_s(pair, demand, figures), _alone_s(decode, uncached, figures)
    if pair_s is None or alone_s is None:
        return replace(pair if turn % 2 == 0 else alone, why=Why.TRIAL)
    best, other = (pair, alone) if pair_s < alone_s else (alone, pair)
    trial = turn % TRIAL_EVERY == TRIAL_EVERY - 1 and max(pair_s, alone_s) < _TRIAL_LIMIT * min(pair_s, alone_s)
    why = Why.TRIAL if trial else Why.SOONER
    return replace(other if trial else best, why=why, pair_s=pair_s, alone_s=alone_s)


def _alone_s(decode: Candidate, uncached: int, figures: Figures) -> float | None:
    """What the request waits for its first token, plus what all that generate there wait for it to be computed."""
    if figures.alone is None:
        return None
    return figures.alone.at(_queued(decode) + uncached) + figures.alone.per_token_s * uncached * _generating(decode)


def _pair_s(pair: Plan, demand: Demand, figures: Figures) -> float | None:
    """What the request waits for its first and for its second token, plus what all others at decode wait for it.

    Where the two share cores, computing takes longer beside a decode worker that has something to do.
    """
    prefill, decode = pair.computes, pair.generates
    if figures.prefill is None or figures.handoff is None:
        return None
    others = max(decode.load.running + decode.load.waiting, decode.assigned)
    shared = _shared(prefill, decode, figures) if others else 0.0
    compute_s = figures.prefill.per_token_s * uncached_tokens(prefill, demand.num_tokens) / (1 - shared)
    waits_s = figures.prefill.at(_queued(prefill)) + figures.handoff.at(uncached_tokens(decode, demand.num_tokens))
    return waits_s + compute_s * (1 + shared * others)


def _shared(prefill: Candidate, decode: Candidate, figures: Figures) -> float:
    if prefill.address.rpartition(":")[0] != decode.address.rpartition(":")[0]:
        return 0.0
    return _SHARED_AT_FIRST if figures.shared is None else figures.shared


def _queued(worker: Candidate) -> int:
    # The worker's own word is a moment old, this gateway's count knows nothing of other gateways: the larger holds.
    return max(worker.load.waiting_tokens, worker.queued_tokens)


def _generating(worker: Candidate) -> int:
    """Sequences that computing would hold up: not those that still wait themselves."""
    return max(worker.generating, worker.load.running - (worker.assigned - worker.generating))


def _best_pair(prefills: Sequence[Candidate], decodes: Sequence[Candidate], demand: Demand) -> Plan | None:
    """Both lists are cheapest first, so the first prefill that a decode worker can pair with is its best."""
    pairs = []
    for decode in decodes:
        partner = next((prefill for prefill in prefills if _can_pair(prefill, decode)), None)
        if partner is not None:
            pairs.append((_cost(partner, demand.num_tokens) + _cost(decode, demand.num_tokens), Plan(partner, decode)))
    return min(pairs, key=lambda pair: pair[0])[1] if pairs else None


def _can_pair(prefill: Candidate, decode: Candidate) -> bool:
    speak = prefill.pairs_by == decode.pairs_by and not prefill.transports.isdisjoint(decode.transports)
    return speak and prefill.id not in decode.load.avoid


def _why_not(able: Sequence[Candidate], fitting: Sequence[Candidate], demand: Demand) -> NoPlan:
    def could_run(workers: Sequence[Candidate]) -> bool:
        return any(worker.role is WorkerRole.DECODE or demand.one_token for worker in workers)

    if not could_run(able):
        return NoPlan.NO_WORKER
    return NoPlan.NOT_NOW if could_run(fitting) else NoPlan.TOO_LARGE
