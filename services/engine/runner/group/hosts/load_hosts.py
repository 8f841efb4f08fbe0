"""Makes the runner of a group of ranks on several hosts, on rank 0: waits for the others, and loads as they do."""

import atexit
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.cpu.cores import CoreShare
from services.engine.runner.cpu.load import load_cpu
from services.engine.runner.cpu.place import Place
from services.engine.runner.group.cores import LeadingCores
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.group.hosts.host_messages import Entry, Room, Start, Terms
from services.engine.runner.group.hosts.host_ranks import HostRanks, RankLeftError
from services.engine.runner.group.hosts.joining import settings_of
from services.engine.runner.group.hosts.part_blocks import part_blocks
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.group.hosts.room import blocks_of, kernels_of, room_of
from services.engine.runner.group.hosts.store import SharedStore
from services.engine.runner.group.links import GroupLinks
from services.engine.runner.group.load_group import LoadedGroup, experts_of, joined_weights, longest_step
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.load_plan import LoadPlan
from services.engine.runner.progress import Progress
from services.protocol.model_files.base import ModelError

GLOO_NAME = "baton"
GLOO_PATIENCE_S = 600.0  # of a sum: ranks that are lost are noticed by who watches them
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHosts:
    """A group whose other ranks are on other hosts, and the connections to these."""

    group: LoadedGroup
    others: HostRanks


def load_hosts(plan: LoadPlan, share: CoreShare | None, progress: Progress, place: HostPlace) -> LoadedHosts:
    """Loads rank 0 of a plan, whose other ranks are on other hosts. Raises ModelError."""
    openmp = loaded_openmp()
    if openmp is None or share is None:
        raise ModelError("--group needs GNU's OpenMP, or one that can stand in for it")
    shard = plan.shard(0)
    terms = Terms(
        group=secrets.token_hex(8),
        engine=dict(settings_of(plan.engine)),
        fingerprint=plan.fingerprint(),
        kernels=kernels_of(plan),
    )
    others = HostRanks(place, terms)
    try:
        progress.stage("waiting for the other hosts")
        rooms, num_blocks, store = _start(others, plan, shard)
        ranks = _meet(others, place.size, store)
        cores = LeadingCores(openmp, share, 1, most=min(room.threads for room in rooms))
        pool = SharedPages.create("baton-kv", shard.pool_bytes(num_blocks)).array[: shard.pool_bytes(num_blocks)]
        own = load_cpu(shard, Place(cores, ranks, pool), progress, num_blocks)
        progress.stage("waiting for the other ranks")
        answers = others.answers()
    except BaseException:
        others.close()
        raise
    blocks = part_blocks(plan, shard, pool, num_blocks)
    experts = experts_of([plan.shard(rank) for rank in range(place.size)])
    runner = GroupRunner(own.runner, plan.layout, blocks, GroupLinks(others, ranks, others, cores), experts)
    atexit.register(runner.close)
    notices = dict.fromkeys((*own.notices, *(notice for answer in answers for notice in answer.notices)))
    group = LoadedGroup(runner, own.kernels, joined_weights(own.weights, answers), tuple(notices))
    return LoadedHosts(group, others)


def _start(others: HostRanks, plan: LoadPlan, shard: LoadPlan) -> tuple[list[Room], int, SharedStore]:
    """Starts all ranks once they are there. Returns the room of each, the blocks, and the store. Raises ModelError."""
    store = SharedStore(lambda key, value: others.tell_entry(Entry.of(key, value)))

    def on_entry(rank: int, entry: Entry) -> None:
        store.put(entry.key, entry.value)
        others.pass_on(rank, entry)

    while True:
        rooms = [room_of(plan, shard), *others.gathered()]
        num_blocks = blocks_of(plan, rooms)
        try:
            others.start(Start(num_blocks=num_blocks, longest=longest_step(plan, num_blocks)), on_entry)
        except RankLeftError:
            continue  # its place is free again, and `gathered` waits for who takes it
        return rooms, num_blocks, store


def _meet(others: HostRanks, size: int, store: SharedStore) -> GlooRanks:
    """Joins all ranks by Gloo. Raises ModelError."""
    return _unless_lost(others, lambda: GlooRanks(store, GLOO_NAME, 0, size, GLOO_PATIENCE_S, others.own_host))


def _unless_lost(others: HostRanks, make: Callable[[], GlooRanks]) -> GlooRanks:
    """Makes it on another thread, since Gloo waits for ranks that do not come. Raises ModelError."""
    made: Future[GlooRanks] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="gloo", daemon=True).start()
    while True:
        others.check()
        try:
            return made.result(_LOOK_S)
        except TimeoutError:
            continue
        except RankLostError as error:
            raise ModelError(f"the ranks do not find each other: {error}") from error
