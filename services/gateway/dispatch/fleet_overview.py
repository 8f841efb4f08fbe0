"""The fleet as consoles show it: all workers that are there, were there or are to come, and pairs that are avoided.

Nothing here changes what it looks at.
"""

from collections.abc import Iterable, Iterator, Mapping

from services.config import WorkerRole
from services.gateway.dispatch.descriptions import describe_worker
from services.gateway.dispatch.fleet import Fleet, LiveWorker
from services.gateway.dispatch.links import WorkerLink
from services.gateway.dispatch.lives import Life, WorkerLives
from services.gateway.dispatch.lost_links import in_plain_words
from services.gateway.dispatch.pair_health import PairHealth
from services.gateway.overview import AvoidedPair, BlockUse, WorkerOverview, WorkerState


def overview_of_workers(
    fleet: Iterable[LiveWorker],
    links: Mapping[str, WorkerLink],
    lives: WorkerLives,
    now: float,
) -> list[WorkerOverview]:
    """Returns all workers by their addresses. now: in seconds since 1970."""
    found = {worker.link.address: _live(worker, lives.get(worker.link.address, now)) for worker in fleet}
    for address, link in links.items():
        if not link.connected and address not in found:
            found[address] = _without_stream(link, lives.get(address, now))
    for address, (why, since) in lives.refused_since().items():
        found.setdefault(address, _absent(address, WorkerState.REFUSED, why, since, None))
    for address, life in lives.gone(now):
        found.setdefault(address, _absent(address, WorkerState.GONE, life.why, life.since, life))
    return [found[address] for address in sorted(found)]


def _live(worker: LiveWorker, life: Life | None) -> WorkerOverview:
    load, total = worker.load, worker.hello.num_blocks
    quarantined = load.quarantined_blocks
    since = worker.link.since if life is None else life.since
    if load.draining and life is not None and life.draining_since is not None:
        since = life.draining_since
    return WorkerOverview(
        address=worker.link.address,
        state=WorkerState.DRAINING if load.draining else WorkerState.OK,
        why=None,
        since=since,
        restarted=0 if life is None else life.restarted,
        described=describe_worker(worker),
        blocks=BlockUse(max(0, total - load.available_blocks - quarantined), total, quarantined),
        computed_tokens=load.computed_tokens,
        evicted_blocks=load.evicted_blocks,
    )


def _without_stream(link: WorkerLink, life: Life | None) -> WorkerOverview:
    if link.refused:
        return _absent(link.address, WorkerState.REFUSED, link.why_not, link.since, life)
    if life is None:
        return _absent(link.address, WorkerState.CONNECTING, link.why_not, link.since, None)
    return _absent(link.address, WorkerState.GONE, life.why, life.since, life)


def _absent(address: str, state: WorkerState, why: str, since: float, life: Life | None) -> WorkerOverview:
    words = in_plain_words(why)
    return WorkerOverview(
        address=address,
        state=state,
        why=words,
        detail=None if words == why else why,
        since=since,
        restarted=0 if life is None else life.restarted,
        described={"address": address, **({} if life is None else life.described)},
    )


def avoided_pairs(fleet: Fleet, health: PairHealth, loop_now: float, now: float) -> list[AvoidedPair]:
    """Returns the pairs that are left alone. loop_now: on the ledger's clock; now: in seconds since 1970."""
    found = []
    for prefill, decode in health.avoided(loop_now):
        first, second, failed_at = fleet.get(prefill), fleet.get(decode), health.failing_since((prefill, decode))
        if first is not None and second is not None:
            since = None if failed_at is None else now - (loop_now - failed_at)
            found.append(AvoidedPair(first.link.address, second.link.address, "a handoff failed", since))
    return found + list(_avoided_by_decode(fleet, {(pair.prefill, pair.decode) for pair in found}))


def _avoided_by_decode(fleet: Fleet, known: set[tuple[str, str]]) -> Iterator[AvoidedPair]:
    for worker in fleet:
        if worker.hello.role is WorkerRole.DECODE:
            for producer in worker.load.avoid:
                other = fleet.get(producer)
                if other is not None and (other.link.address, worker.link.address) not in known:
                    why = "the decode worker asks for it: reads stood still, or the other is silent"
                    yield AvoidedPair(other.link.address, worker.link.address, why, None)
