"""The workers with a live stream: their ids, their load, and how many blocks of a prompt each caches."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.gateway.dispatch.isolation import NONE_UNPROVEN, Unproven
from services.gateway.dispatch.ledger.workload import Workload
from services.gateway.dispatch.links import WorkerLink
from services.gateway.dispatch.router import Candidate, Plan
from services.prefix_index.base import PrefixIndex
from services.prefix_index.memory import depth_of
from services.protocol.block_hash import BlockHash, block_names
from services.protocol.capsule import Capsule
from services.protocol.frames import Load
from services.protocol.messages import WorkerHello, WorkerNews

Naming = tuple[str, int]  # fingerprint and block size


@dataclass(slots=True, eq=False)
class LiveWorker:
    """A worker, for the life of one stream."""

    id: WorkerId
    link: WorkerLink
    hello: WorkerHello  # as its news have changed it
    load: Load
    heard_at: float = 0.0  # on the loop's clock

    @property
    def host(self) -> str:
        """The host in the worker's address."""
        return self.link.address.rpartition(":")[0]

    @property
    def naming(self) -> Naming:
        """Fingerprint and block size: workers in which both are equal give the same contents the same names."""
        return self.hello.fingerprint, self.hello.block_size


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks of a prompt, and who caches them."""

    chains: dict[Naming, list[BlockHash]]  # the full blocks of the prompt
    depths: dict[WorkerId, int]  # how many leading blocks each worker caches


class Fleet:
    """All live workers. Removes workers that are gone from the index."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._workers: dict[WorkerId, LiveWorker] = {}
        self.ever_known: set[str] = set()  # names of capabilities that any worker had so far; to be read by others
        self._lost_at = 0.0  # the last worker

    def __iter__(self) -> Iterator[LiveWorker]:
        return iter(self._workers.values())

    def add(self, worker: LiveWorker) -> None:
        """Adds a worker whose stream began."""
        self._workers[worker.id] = worker
        self.ever_known |= worker.hello.knows

    def change(self, worker: LiveWorker, news: WorkerNews) -> None:
        """Puts a worker's news into its hello."""
        worker.hello = replace(worker.hello, knows=news.knows, embedding_size=news.embedding_size)
        self.ever_known |= news.knows

    def remove(self, id: WorkerId, now: float) -> LiveWorker:
        """Removes a worker whose stream ended."""
        self._lost_at = now
        self.index.remove_worker(id)
        return self._workers.pop(id)

    def cut_off_from(self, worker: LiveWorker) -> list[LiveWorker]:
        """Workers of the other role that would pair with this one if they had a transport in common."""
        pairs_by = (worker.hello.fingerprint, worker.hello.kv_protocol)
        return [
            other
            for other in self
            if other.hello.role is not worker.hello.role
            and (other.hello.fingerprint, other.hello.kv_protocol) == pairs_by
            and set(other.hello.transports).isdisjoint(worker.hello.transports)
        ]

    def beside(self, worker: LiveWorker) -> list[LiveWorker]:
        """Workers of the other role on the same host."""
        return [other for other in self if other.hello.role is not worker.hello.role and other.host == worker.host]

    def get(self, id: WorkerId) -> LiveWorker | None:
        """The worker with this id; None: it has no stream."""
        return self._workers.get(id)

    def has(self, role: WorkerRole) -> bool:
        """True when a worker of this role is there and takes new work."""
        return any(worker.hello.role is role and not worker.load.draining for worker in self)

    def max_model_len(self) -> int | None:
        """The tokens of a sequence that every live worker can hold; None: there is no worker."""
        return min((worker.hello.max_model_len for worker in self), default=None)

    def embedding_size(self) -> int:
        """The numbers of an embedding; 0: no live worker makes any."""
        return max((worker.hello.embedding_size for worker in self), default=0)

    def most_choices(self, plan: Plan) -> int:
        """The number of choices over one prompt that a plan's workers can run as one group, beside the prompt."""
        workers = (self._workers[candidate.id] for candidate in plan.workers())
        return max(1, min(worker.hello.max_num_seqs for worker in workers) - 1)

    async def look_up(self, capsule: Capsule) -> Prefix:
        """Asks the index which workers cache the capsule's tokens, once for each naming in the fleet."""
        prefix = Prefix({}, {})
        namespace, contents = capsule.namespace, capsule.contents
        for naming in {worker.naming for worker in self}:
            fingerprint, block_size = naming
            chain = block_names(fingerprint, namespace, contents, block_size)
            prefix.chains[naming] = chain
            prefix.depths.update(await self.index.depths(chain))
        return prefix

    def deepen(self, prefix: Prefix, queued: Mapping[WorkerId, Container[BlockHash]]) -> None:
        """Raises the depths of workers that are to compute further blocks for earlier prompts: `queued`, by worker."""
        for id, blocks in queued.items():
            worker = self.get(id)
            if worker is not None and (chain := prefix.chains.get(worker.naming)):
                cached = prefix.depths.get(id, 0)
                prefix.depths[id] = cached + depth_of(chain[cached:], blocks)

    def missing_blocks(self, prefix: Prefix, candidate: Candidate) -> Sequence[BlockHash]:
        """The full blocks of the prompt that a worker neither caches nor is to compute for an earlier prompt."""
        worker = self.get(candidate.id)
        return () if worker is None else prefix.chains.get(worker.naming, [])[candidate.depth :]

    def placed(self, prefix: Prefix, plan: Plan) -> None:
        """Tells the index which workers a prompt goes to."""
        for candidate in plan.workers():
            worker = self.get(candidate.id)
            if worker is not None and worker.naming in prefix.chains:
                self.index.placed(worker.id, prefix.chains[worker.naming])

    def candidates(
        self, depths: Mapping[WorkerId, int], workload: Workload, unproven: Unproven = NONE_UNPROVEN
    ) -> list[Candidate]:
        """The live workers as the router sees them; ignores the depths of other workers."""
        return [
            Candidate(
                id=worker.id,
                address=worker.link.address,
                role=worker.hello.role,
                pairs_by=(worker.hello.fingerprint, worker.hello.kv_protocol),
                transports=frozenset(worker.hello.transports),
                block_size=worker.hello.block_size,
                num_blocks=worker.hello.num_blocks,
                max_model_len=worker.hello.max_model_len,
                load=worker.load,
                knows=worker.hello.knows,
                depth=depths.get(worker.id, 0),
                queued_tokens=workload.queued_tokens.get(worker.id, 0),
                assigned=workload.assigned.get(worker.id, 0),
                generating=workload.generating.get(worker.id, 0),
                outlives_others=worker.heard_at > self._lost_at,
                unproven=unproven.attempts.get(worker.id, 0),
                suspects=unproven.suspects.get(worker.id, 0),
            )
            for worker in self
        ]
