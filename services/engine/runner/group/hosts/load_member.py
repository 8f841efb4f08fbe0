"""Loads the part of a model that a rank on another host than rank 0's has."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtransfer.block_memory import GroupBlocks
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.gloo_ranks import GlooRanks
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.cpu.load import load_cpu
from services.engine.runner.cpu.place import Place
from services.engine.runner.group.connection import Connection
from services.engine.runner.group.cores import GroupCores
from services.engine.runner.group.hosts.group_member import GroupMember
from services.engine.runner.group.hosts.host_messages import Entry, Refused, Start, Terms
from services.engine.runner.group.hosts.joining import Invitation, connect_kv, engine_of
from services.engine.runner.group.hosts.load_hosts import GLOO_NAME, GLOO_PATIENCE_S
from services.engine.runner.group.hosts.part_blocks import part_blocks
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.group.hosts.room import kernels_of, room_of
from services.engine.runner.group.hosts.store import SharedStore
from services.engine.runner.group.load_rank import Rank
from services.engine.runner.group.rank_config import RankAnswer
from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.load_plan import LoadPlan, plan_load
from services.engine.runner.memory import check_fits
from services.engine.runner.progress import Progress
from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A rank that has loaded, and what it needs for KV."""

    rank: Rank
    blocks: GroupBlocks  # the bytes of every block that the rank has
    kv: Connection  # to rank 0


def accept(own: EngineConfig, invitation: Invitation, rank: int) -> LoadPlan:
    """Takes rank 0's terms, and tells it of the room here. Returns the plan. Raises ModelError, of which rank 0 hears,
    and ConnectionLostError.
    """
    try:
        plan = plan_load(engine_of(own, invitation.terms))
        _check(plan, invitation.terms)
        room = room_of(plan, plan.shard(rank))
    except ModelError as error:
        invitation.steps.send(Refused(reason=str(error)).pack())
        raise
    invitation.steps.send(room.pack())
    return plan


def load_member(
    plan: LoadPlan, place: HostPlace, invitation: Invitation, on_lost: Callable[[str], None], progress: Progress
) -> Member:
    """Waits until all ranks are there, and loads. Raises ModelError, of which rank 0 hears, and RankLostError.

    on_lost: see `GroupMember`.
    """
    store = SharedStore(lambda key, value: member.tell_entry(Entry.of(key, value)))
    member = GroupMember(place.rank, invitation.steps, lambda entry: store.put(entry.key, entry.value), on_lost)
    progress.stage("waiting for the other hosts")
    start = member.started()
    kv = connect_kv(place, invitation.terms)
    try:
        ranks = _meet(store, place, member)
        shard = plan.shard(place.rank)
        pool = _pool(shard, start)
        rank = _load(shard, ranks, member, start, pool, progress)
        return Member(rank, part_blocks(plan, shard, pool, start.num_blocks), kv)
    except ModelError as error:
        member.answer(RankAnswer(refused=str(error)), start.longest)
        raise


def _check(plan: LoadPlan, terms: Terms) -> None:
    """Raises ModelError where this host would compute something else than rank 0's."""
    if plan.fingerprint() != terms.fingerprint:
        raise ModelError(f"{plan.engine.model} is another model than rank 0's")
    if (kernels := kernels_of(plan)) != terms.kernels:
        raise ModelError(
            f"this host computes by {kernels}, rank 0's by {terms.kernels}: BATON_CPU_ISA with the lower class of the "
            "two on all hosts makes them round alike"
        )


def _meet(store: SharedStore, place: HostPlace, member: GroupMember) -> GlooRanks:
    try:
        return GlooRanks(store, GLOO_NAME, place.rank, place.size, GLOO_PATIENCE_S, member.own_host)
    except RankLostError as error:
        raise ModelError(f"the ranks do not find each other: {error}") from error


def _pool(shard: LoadPlan, start: Start) -> np.ndarray:
    num_bytes = shard.pool_bytes(start.num_blocks)
    check_fits(num_bytes, "the KV pool")
    return SharedPages.create("baton-kv", num_bytes).array[:num_bytes]


def _load(
    shard: LoadPlan, ranks: GlooRanks, member: GroupMember, start: Start, pool: np.ndarray, progress: Progress
) -> Rank:
    openmp = loaded_openmp()
    if openmp is None:
        raise ModelError("--group needs GNU's OpenMP, or one that can stand in for it")
    cores = GroupCores(openmp)
    loaded = load_cpu(shard, Place(cores, ranks, pool), progress, start.num_blocks)
    answer = RankAnswer(
        weight_bytes=loaded.weights.num_bytes, not_shared=loaded.weights.not_shared, notices=loaded.notices
    )
    member.answer(answer, start.longest)
    return Rank(loaded.runner, member, ranks, cores, answer)
