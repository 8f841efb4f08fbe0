"""Which workers a request goes to: a pure function of what is known of them.

A worker's cost is the prompt tokens that it would compute or fetch for this request, plus those queued there already,
plus what its running sequences are worth in the same coin, plus the tokens for which it has no free block. The
cheapest wins; between equals the turn decides. The costs of a pair's two sides do not depend on each other, so the
best pair is found without trying all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from services.config import HandoffMode, WorkerRole
from services.protocol.frames import Load

WorkerId = NewType("WorkerId", int)  # the incarnation of a worker with a live stream

# What one running sequence weighs against prompt tokens still to be computed. A decode step handles one token of each
# running sequence, so a sequence delays a newcomer by about as much as a small piece of a prompt.
SEQUENCE_COST = 16


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
    assigned: int = 0  # attempts of this gateway that it generates for


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
    threshold: int  # uncached tokens at the decode worker, for HandoffMode.AUTO


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to send a request: to a pair, or to one worker alone."""

    prefill: Candidate | None
    decode: Candidate | None

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


class NoPlan(Enum):
    """Why a request goes nowhere."""

    NO_WORKER = "no worker that can run it is connected"
    TOO_LARGE = "it fits no worker that is connected"
    NOT_NOW = "every worker that could run it refused it just now"


def make_plan(candidates: Iterable[Candidate], demand: Demand, policy: Policy, turn: int) -> Plan | NoPlan:
    """The cheapest plan that the policy allows, or why there is none. `turn` rotates between equals."""
    able = [worker for worker in candidates if worker.role is WorkerRole.DECODE or _may_prefill(demand, policy)]
    fitting = [worker for worker in able if _fits(worker, demand)]
    ready = [worker for worker in fitting if worker.id not in demand.avoid]
    prefills = _by_cost((worker for worker in ready if worker.role is WorkerRole.PREFILL), demand, turn)
    decodes = _by_cost((worker for worker in ready if worker.role is WorkerRole.DECODE), demand, turn)
    if demand.one_token and prefills and (policy.handoff is not HandoffMode.NEVER or not decodes):
        return Plan(prefills[0], None)
    if decodes:
        return _split_or_alone(prefills, decodes, demand, policy)
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
    # The worker's own word is a moment old, this gateway's count knows nothing of other gateways: the larger holds.
    queued = max(worker.load.waiting_tokens, worker.queued_tokens)
    sequences = max(worker.load.running + worker.load.waiting, worker.assigned)
    uncached = uncached_tokens(worker, num_tokens)
    missing = max(0, uncached - worker.load.available_blocks * worker.block_size)
    return uncached + queued + sequences * SEQUENCE_COST + missing


def _split_or_alone(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], demand: Demand, policy: Policy
) -> Plan:
    alone = Plan(None, decodes[0])
    if policy.handoff is HandoffMode.NEVER:
        return alone
    if policy.handoff is HandoffMode.AUTO and uncached_tokens(decodes[0], demand.num_tokens) <= policy.threshold:
        return alone
    return _best_pair(prefills, decodes, demand) or alone


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
