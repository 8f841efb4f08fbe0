"""Routing: chooses the workers for a request, as a pure function of what is known of them.

A worker's cost is the prompt tokens that it would compute or fetch for this request, plus those queued there already,
plus a number of tokens for each running sequence, plus the tokens for which it has no free block. The cheapest worker
wins; between equals the turn decides. The costs of a pair's two workers do not depend on each other, so the best pair
is found without trying all pairs.

In automatic mode, time decides whether the best pair or the best decode worker alone gets the request: the time that
this request waits, and the time that it makes others wait. A prompt computed on a decode worker holds up all sequences
that generate there. A prefill worker on the same host takes cores from them too, but no more than it shares, and a
handoff takes time of its own. `Figures` holds these times, which costs.py learns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from kvtransfer.ids import WorkerId
from services.config import HandoffMode, WorkerRole
from services.gateway.dispatch.retries import Pair
from services.protocol.capabilities import EMBEDDINGS
from services.protocol.frames import Load

# The weight of one running sequence against prompt tokens still to be computed. A decode step handles one token of each
# running sequence, so a sequence delays a newcomer by about as much as a small piece of a prompt.
SEQUENCE_COST = 16

# In automatic mode one request in this many takes the plan that looks worse, so that its cost stays known; unless it
# looks far worse.
TRIAL_EVERY = 64
_TRIAL_LIMIT = 3.0
# The tokens that a session's worker may cost more than the cheapest one: it may cache what the index does not know yet.
_SESSION_LIMIT = 2048
# The share of its cores that a decode worker loses to a busy prefill worker of its host, until that was measured.
_SHARED_AT_FIRST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live worker, as one request sees it."""

    id: WorkerId
    address: str
    role: WorkerRole
    # Two workers can hand over to each other if they have equal `pairs_by` and a transport in common.
    pairs_by: tuple[str, int]  # fingerprint, kv protocol
    transports: frozenset[str]
    block_size: int
    num_blocks: int
    max_model_len: int
    load: Load
    knows: frozenset[str] = frozenset()  # see WorkerHello
    depth: int = 0  # leading blocks of this prompt in its cache
    queued_tokens: int = 0  # see Workload
    assigned: int = 0  # see Workload
    generating: int = 0  # see Workload
    outlives_others: bool = True  # it was heard of since the last worker was lost
    unproven: int = 0  # attempts there without progress, of this gateway; counted where there is a suspect
    suspects: int = 0  # those of them that are suspects

    @property
    def size(self) -> tuple[int, int]:
        """The limits for one request: blocks, and tokens of a sequence."""
        return self.num_blocks, self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A request's demands on its workers."""

    num_tokens: int  # to be in KV before the next token
    one_token: bool = False  # the request ends with the next token
    too_small: frozenset[tuple[int, int]] = frozenset()  # sizes of workers that it was too large for
    avoid: frozenset[WorkerId] = frozenset()  # workers that refused it just now
    avoid_pairs: frozenset[Pair] = frozenset()  # pairs whose handoffs failed
    without_handoff: bool = False  # its handoffs failed at several pairs
    needs: frozenset[str] = frozenset()  # see Capsule
    stays_with: WorkerId | None = None  # the worker that generated the last answer of its session
    suspect: bool = False  # it may be what ends workers, see isolation.py
    kept: frozenset[WorkerId] = frozenset()  # workers that are kept free for suspects

    @property
    def embeds(self) -> bool:
        """True when the request ends with an embedding of the prompt, and no token."""
        return EMBEDDINGS in self.needs


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule by which a request is split between two workers."""

    handoff: HandoffMode
    threshold: int | None = None  # for HandoffMode.AUTO: uncached tokens at the decode worker; None: by what is learned


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds for a number of tokens."""

    base_s: float
    per_token_s: float

    def at(self, tokens: float) -> float:
        """The time for so many tokens, in seconds."""
        return self.base_s + self.per_token_s * tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Measured costs of plans. None: not known so far."""

    prefill: Line | None = None  # to the first token at a prefill worker, by tokens to compute
    alone: Line | None = None  # the same at a decode worker without a handoff
    handoff: Line | None = None  # from the first token to the second, beyond a step, by tokens to fetch
    shared: float | None = None  # of a decode worker's time, lost to a busy prefill worker of its host; 0 to 1
    first_at_prefill: Line | None = None  # as `prefill` and `alone`, where no sequence waited for a slot before it
    first_at_decode: Line | None = None
    slot_s: float | None = None  # until a decode worker whose queue is not empty has room for the next sequence


class Why(StrEnum):
    """The reason for a pair or for a decode worker alone."""

    FORCED = "forced"  # the policy leaves no choice
    NO_PAIR = "no pair"  # there is no prefill worker, or none that can pair
    ONE_TOKEN = "one token"  # nothing would be left to do after a handoff
    EMBEDDING = "embedding"  # no token is to be generated
    CACHED = "cached"  # all but a block is in decode's cache
    THRESHOLD = "threshold"  # the policy's own
    TRIAL = "trial"  # to learn what it costs
    SOONER = "sooner"  # less waiting, its own and others'
    SUSPECT = "suspect"  # it may be what ends workers: it is computed apart


class PlanKind(StrEnum):
    """The roles of a plan's workers."""

    PAIR = "pair"
    DECODE = "decode"  # a decode worker alone
    PREFILL = "prefill"  # a prefill worker alone


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers that get a request: a pair, or one worker alone."""

    prefill: Candidate | None
    decode: Candidate | None
    why: Why = Why.FORCED
    pair_s: float | None = None  # expected of a pair, and of a decode worker alone; None: not computed
    alone_s: float | None = None

    @property
    def split(self) -> bool:
        """True when the plan needs a handoff."""
        return self.prefill is not None and self.decode is not None

    @property
    def pair(self) -> Pair | None:
        """The ids of both workers; None: there is no handoff."""
        return (self.prefill.id, self.decode.id) if self.prefill is not None and self.decode is not None else None

    @property
    def pair_names(self) -> tuple[str, str]:
        """The addresses of both workers; an empty one where there is no such worker."""
        return (self.prefill.address if self.prefill else "", self.decode.address if self.decode else "")

    @property
    def kind(self) -> PlanKind:
        """The roles of the plan's workers."""
        if self.split:
            return PlanKind.PAIR
        return PlanKind.DECODE if self.decode is not None else PlanKind.PREFILL

    def workers(self) -> list[Candidate]:
        """All workers that are sent the request."""
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    @property
    def computes(self) -> Candidate:
        """The worker that computes the prompt."""
        worker = self.prefill or self.decode
        assert worker is not None
        return worker

    @property
    def generates(self) -> Candidate:
        """The worker that generates all tokens, or all but the first."""
        worker = self.decode or self.prefill
        assert worker is not None
        return worker


_NOTHING_KNOWN = Figures()


class NoPlan(Enum):
    """The reason why a request is sent to no worker."""

    NO_WORKER = "no worker that can run it is connected"
    TOO_LARGE = "it fits no worker that is connected"
    NOT_NOW = "every worker that could run it refused it just now, or is kept free"


def make_plan(
    candidates: Iterable[Candidate], demand: Demand, policy: Policy, turn: int, figures: Figures = _NOTHING_KNOWN
) -> Plan | NoPlan:
    """Returns the cheapest plan that the policy allows, or why there is none. `turn` rotates between equals."""
    knowing = [worker for worker in candidates if lacks(worker, demand) is None]
    if demand.embeds:
        return _plan_embedding(knowing, demand, turn)
    able = [worker for worker in knowing if worker.role is WorkerRole.DECODE or _may_prefill(demand, policy)]
    fitting = [worker for worker in able if fits(worker, demand)]
    ready = [worker for worker in fitting if why_not_ready(worker, demand) is None]
    prefills = _by_cost((worker for worker in ready if worker.role is WorkerRole.PREFILL), demand, turn)
    decodes = _by_cost((worker for worker in ready if worker.role is WorkerRole.DECODE), demand, turn)
    decodes = _of_session(prefills, decodes, demand, policy)
    if demand.suspect and decodes:
        return Plan(None, decodes[0], Why.SUSPECT)
    if demand.one_token and prefills and (policy.handoff is not HandoffMode.NEVER or not decodes):
        return Plan(prefills[0], None, Why.ONE_TOKEN)
    if decodes:
        no_pair = policy.handoff is HandoffMode.NEVER or demand.without_handoff
        pair = None if no_pair else _best_pair(prefills, decodes, demand)
        alone = Plan(None, decodes[0], Why.FORCED if policy.handoff is HandoffMode.NEVER else Why.NO_PAIR)
        if pair is None or policy.handoff is HandoffMode.ALWAYS:
            return pair or alone
        return _pair_or_alone(pair, alone, demand, policy, figures, turn)
    return _why_not(able, fitting, demand)


def _plan_embedding(able: Sequence[Candidate], demand: Demand, turn: int) -> Plan | NoPlan:
    fitting = [worker for worker in able if fits(worker, demand)]
    ready = _by_cost((worker for worker in fitting if why_not_ready(worker, demand) is None), demand, turn)
    return Plan(ready[0], None, Why.EMBEDDING) if ready else _why_not(able, fitting, demand)


def uncached_tokens(worker: Candidate, num_tokens: int) -> int:
    """The number of a prompt's tokens that this worker does not cache. The last token is always computed."""
    full_blocks = (num_tokens - 1) // worker.block_size
    return num_tokens - min(worker.depth, full_blocks) * worker.block_size


def queued_tokens(worker: Candidate) -> int:
    """Prompt tokens that the worker has still to compute."""
    # The worker's own figure is a moment old, and this gateway's count leaves out other gateways: the larger one holds.
    return max(worker.load.waiting_tokens, worker.queued_tokens)


def _may_prefill(demand: Demand, policy: Policy) -> bool:
    return demand.one_token or policy.handoff is not HandoffMode.NEVER


def lacks(worker: Candidate, demand: Demand) -> str | None:
    """Names what the request asks for and the worker cannot do; None: it can do all of it."""
    return None if demand.needs <= worker.knows else f"it knows no {min(demand.needs - worker.knows)}"


def _of_session(prefills: list[Candidate], decodes: list[Candidate], demand: Demand, policy: Policy) -> list[Candidate]:
    """The worker that has the request's session alone, unless it is gone or overloaded; else all of them.

    It is overloaded where sequences wait there, or where it costs far more than the cheapest one. It is also left where
    a handoff is forced and only other workers can have one.
    """
    own = [worker for worker in decodes if worker.id == demand.stays_with]
    if not own or own[0].load.waiting:
        return decodes
    if cost(own[0], demand.num_tokens) > _SESSION_LIMIT + cost(decodes[0], demand.num_tokens):
        return decodes
    needs_pair = policy.handoff is HandoffMode.ALWAYS and not demand.without_handoff
    if needs_pair and _best_pair(prefills, own, demand) is None:
        return decodes
    return own


def why_not_ready(worker: Candidate, demand: Demand) -> str | None:
    """The reason why a worker that fits a request cannot take it now; None: it can."""
    if worker.load.draining:
        return "it drains"
    if worker.id in demand.avoid:
        return "it refused the request just now"
    if worker.suspects:
        return "it has a request that may be what ends workers"
    if not demand.suspect:
        return "it is kept free for a request that may be what ends workers" if worker.id in demand.kept else None
    apart = runs_alone(worker, demand) and worker.outlives_others and not worker.unproven
    return None if apart else "the request may be what ends workers, and the worker has others without progress"


def runs_alone(worker: Candidate, demand: Demand) -> bool:
    """True when the worker needs no other one for the request."""
    return EMBEDDINGS in worker.knows if demand.embeds else worker.role is WorkerRole.DECODE


def fits(worker: Candidate, demand: Demand) -> bool:
    """True when an idle worker could hold the request."""
    tokens = demand.num_tokens + (worker.role is WorkerRole.DECODE)  # decode holds the next position too
    needed = -(-tokens // worker.block_size)
    no_larger = any(
        worker.num_blocks <= num_blocks and worker.max_model_len <= max_model_len
        for num_blocks, max_model_len in demand.too_small
    )
    fits_context = demand.num_tokens + (not demand.embeds) <= worker.max_model_len  # room for a token
    return worker.num_blocks >= needed and fits_context and not no_larger


def _by_cost(workers: Iterable[Candidate], demand: Demand, turn: int) -> list[Candidate]:
    rotated = sorted(workers, key=lambda worker: worker.id)
    if rotated:
        at = turn % len(rotated)
        rotated = rotated[at:] + rotated[:at]
    return sorted(rotated, key=lambda worker: cost(worker, demand.num_tokens))


def cost(worker: Candidate, num_tokens: int) -> int:
    """The cost of a request of so many tokens at a worker, in tokens."""
    sequences = max(worker.load.running + worker.load.waiting, worker.assigned)
    uncached = uncached_tokens(worker, num_tokens)
    missing = max(0, uncached - worker.load.available_blocks * worker.block_size)
    return uncached + queued_tokens(worker) + sequences * SEQUENCE_COST + missing


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
    """The request's wait for its first token, plus the waits of all sequences that generate there, in seconds."""
    if figures.alone is None:
        return None
    held_up_s = figures.alone.per_token_s * uncached * _generating(decode)
    return figures.alone.at(queued_tokens(decode) + uncached) + held_up_s


def _pair_s(pair: Plan, demand: Demand, figures: Figures) -> float | None:
    """The request's waits for its first and second token, plus the waits of all others at decode, in seconds.

    Where the two workers share cores, a prompt takes longer beside a decode worker that has sequences.
    """
    prefill, decode = pair.computes, pair.generates
    if figures.prefill is None or figures.handoff is None:
        return None
    others = max(decode.load.running + decode.load.waiting, decode.assigned)
    shared = _shared(prefill, decode, figures) if others else 0.0
    compute_s = figures.prefill.per_token_s * uncached_tokens(prefill, demand.num_tokens) / (1 - shared)
    handoff_s = figures.handoff.at(uncached_tokens(decode, demand.num_tokens))
    return figures.prefill.at(queued_tokens(prefill)) + handoff_s + compute_s * (1 + shared * others)


def _shared(prefill: Candidate, decode: Candidate, figures: Figures) -> float:
    if prefill.address.rpartition(":")[0] != decode.address.rpartition(":")[0]:
        return 0.0
    return _SHARED_AT_FIRST if figures.shared is None else figures.shared


def _generating(worker: Candidate) -> int:
    """The number of sequences that a prompt would hold up: those that generate already."""
    return max(worker.generating, worker.load.running - (worker.assigned - worker.generating))


def _best_pair(prefills: Sequence[Candidate], decodes: Sequence[Candidate], demand: Demand) -> Plan | None:
    """Both lists are cheapest first, so the first prefill that a decode worker can pair with is its best."""
    pairs = []
    for decode in decodes:
        partner = next((prefill for prefill in prefills if can_pair(prefill, decode, demand)), None)
        if partner is not None:
            pairs.append((cost(partner, demand.num_tokens) + cost(decode, demand.num_tokens), Plan(partner, decode)))
    return min(pairs, key=lambda pair: pair[0])[1] if pairs else None


def can_pair(prefill: Candidate, decode: Candidate, demand: Demand) -> bool:
    """True when the two can hand over to each other, and their handoffs do not fail."""
    compatible = prefill.pairs_by == decode.pairs_by and not prefill.transports.isdisjoint(decode.transports)
    failing = prefill.id in decode.load.avoid or (prefill.id, decode.id) in demand.avoid_pairs
    return compatible and not failing


def _why_not(able: Sequence[Candidate], fitting: Sequence[Candidate], demand: Demand) -> NoPlan:
    def could_run(workers: Sequence[Candidate]) -> bool:
        return any(worker.role is WorkerRole.DECODE or demand.one_token or demand.embeds for worker in workers)

    if not could_run([worker for worker in able if not worker.load.draining]):
        return NoPlan.NO_WORKER
    return NoPlan.NOT_NOW if could_run(fitting) else NoPlan.TOO_LARGE
