"""How ranks on several hosts come together at rank 0's port, and who is refused there; without any model."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import KvCacheDtype
from services.config.engine import EngineConfig
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.group.connection import Connection, ConnectionLostError, connect
from services.engine.runner.group.hosts import group_port, host_messages, host_ranks, joining
from services.engine.runner.group.hosts.group_member import GroupMember
from services.engine.runner.group.hosts.host_messages import (
    Entry,
    Hello,
    Refused,
    RefusedError,
    Room,
    Start,
    StrangeMessageError,
    Terms,
)
from services.engine.runner.group.hosts.host_ranks import HostRanks, RankLeftError
from services.engine.runner.group.hosts.joining import connect_kv, engine_of, join, settings_of
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.group.messages import RankCopy, pack_end
from services.engine.runner.group.rank_config import RankAnswer
from services.protocol.model_files.base import ModelError

ENGINE = EngineConfig(model=Path("model"), max_model_len=128, tensor_parallel_size=2)
TERMS = Terms(group="a group", engine=dict(settings_of(ENGINE)), fingerprint="a model", kernels="torch")
START = Start(num_blocks=7, longest=1000)
A_STEP = RankCopy(1, 2, 3).pack()
SIZE = 3
SOON_S = 10.0


@pytest.fixture
def place() -> HostPlace:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    return HostPlace(rank=0, size=SIZE, host="127.0.0.1", port=port)


@pytest.fixture
def group(place: HostPlace) -> Iterator[HostRanks]:
    with closing(HostRanks(place, TERMS)) as group:
        yield group


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Joined:
    """A rank above 0 that has joined, without a model."""

    def __init__(self, place: HostPlace, rank: int) -> None:
        self.place = replace(place, rank=rank)
        self.invitation = join(self.place)
        self.invitation.steps.send(Room(num_blocks=rank, threads=rank).pack())
        self.lost: Future[str] = Future()
        self.entries: dict[str, bytes] = {}
        self.told = threading.Semaphore(0)
        self.member = GroupMember(rank, self.invitation.steps, self._on_entry, self.lost.set_result)

    def _on_entry(self, entry: Entry) -> None:
        self.entries[entry.key] = entry.value
        self.told.release()

    def load(self) -> Connection:
        """Does what a rank does that loads. Returns its connection for KV."""
        assert self.member.started() == START
        kv = connect_kv(self.place, self.invitation.terms)
        self.member.tell_entry(Entry.of(f"of {self.place.rank}", b"\x00\xff"))
        self.member.answer(RankAnswer(weight_bytes=self.place.rank), START.longest)
        return kv

    def close(self) -> None:
        self.member.close()


@contextmanager
def joined_group(group: HostRanks, place: HostPlace) -> Iterator[list[Joined]]:
    with ThreadPoolExecutor(SIZE) as pool:
        waiting = pool.submit(group.gathered)
        ranks = [Joined(place, rank) for rank in range(1, SIZE)]
        try:
            assert waiting.result() == [Room(num_blocks=rank, threads=rank) for rank in (1, 2)]
            entries: dict[int, Entry] = {}

            def on_entry(rank: int, entry: Entry) -> None:
                entries[rank] = entry
                group.pass_on(rank, entry)

            group.start(START, on_entry)
            loading = [pool.submit(rank.load) for rank in ranks]
            assert [answer.weight_bytes for answer in group.answers()] == [1, 2]
            for rank, kv in zip(ranks, loading, strict=True):
                with closing(kv.result()):
                    group.kv(rank.place.rank).send((b"of rank 0",))
                    assert kv.result().receive() == b"of rank 0"
                assert rank.told.acquire(timeout=SOON_S)
            assert [rank.entries for rank in ranks] == [{"of 2": b"\x00\xff"}, {"of 1": b"\x00\xff"}]
            assert {rank: entry.key for rank, entry in entries.items()} == {1: "of 1", 2: "of 2"}
            yield ranks
        finally:
            for rank in ranks:
                rank.close()


def test_ranks_join_load_and_get_steps(group: HostRanks, place: HostPlace) -> None:
    with joined_group(group, place) as ranks:
        group.watch(pytest.fail)
        group.send(A_STEP)
        for rank in ranks:
            assert rank.member.receive() == A_STEP[0]
            with pytest.raises(InterruptedError):
                group.wait_done(interrupt)
            rank.member.done(float(rank.place.rank))
        group.wait_done(interrupt_not)
        assert group.waited_s() == [1.0, 2.0]
        group.send(pack_end())
        group.close()
        assert [rank.member.receive() for rank in ranks] == [bytearray(pack_end()[0])] * 2
        assert not any(rank.lost.done() for rank in ranks), "rank 0 has said that all is over"


def interrupt() -> None:
    raise InterruptedError


def interrupt_not() -> None:
    """Goes on."""


def test_the_loss_of_one_rank_ends_all(group: HostRanks, place: HostPlace) -> None:
    with joined_group(group, place) as (first, second):
        lost: Future[str] = Future()
        group.watch(lost.set_result)
        first.close()
        assert lost.result(SOON_S) == "rank 1 is lost: the other end has closed" == group.why_lost()
        assert second.lost.result(SOON_S) == "rank 0 is lost: the other end has closed"
        with pytest.raises(RankLostError, match="rank 0 is lost"):
            second.member.receive()
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            group.send(A_STEP)


def test_a_rank_that_shows_no_life_is_lost(group: HostRanks, place: HostPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ranks, "SERVING_PATIENCE_S", 0.4)
    with joined_group(group, place) as (first, second):
        lost: Future[str] = Future()
        first.member._steps._closed.set()  # it beats no more, as a process that was stopped
        group.watch(lost.set_result)
        assert lost.result(SOON_S) == "rank 1 is lost: nothing came for 0.4 s"
        assert second.lost.result(SOON_S) == "rank 0 is lost: the other end has closed"
        first.member._steps._socket.close()


def test_a_connection_for_kv_may_be_idle_and_not_silent(
    group: HostRanks, place: HostPlace, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = pool.submit(group.gathered)
    ranks = [Joined(place, rank) for rank in range(1, SIZE)]
    waiting.result()
    group.start(START, group.pass_on)
    for module in (host_ranks, joining):
        monkeypatch.setattr(module, "LOADING_PATIENCE_S", 0.6)
    loading = [pool.submit(rank.load) for rank in ranks]
    group.answers()
    first, second = (each.result() for each in loading)
    at_rank_0, at_second = pool.submit(group.kv(1).receive), pool.submit(second.receive)
    with pytest.raises(TimeoutError):
        at_rank_0.result(1.5)
    assert not at_second.done(), "both ends show that they live"
    first._closed.set()  # it beats no more
    with pytest.raises(ConnectionLostError, match=r"nothing came for 0\.6 s"):
        at_rank_0.result(SOON_S)
    second.close()
    for rank in ranks:
        rank.close()
    first._socket.close()


def test_a_rank_that_cannot_load_says_why(group: HostRanks, place: HostPlace, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(group.gathered)
    ranks = [Joined(place, rank) for rank in range(1, SIZE)]
    waiting.result()
    group.start(START, lambda rank, entry: None)
    ranks[1].member.answer(RankAnswer(refused="no memory"), START.longest)
    with pytest.raises(ModelError, match="rank 2: no memory"):
        group.answers()
    for rank in ranks:
        rank.close()


def test_one_that_leaves_before_the_start_may_come_again(
    group: HostRanks, place: HostPlace, pool: ThreadPoolExecutor
) -> None:
    Joined(place, 1).close()
    ranks = [Joined(place, 1), Joined(place, 2)]  # the first tries until the place is free
    assert [room.threads for room in group.gathered()] == [1, 2]
    for rank in ranks:
        rank.close()


def test_one_that_leaves_after_all_were_there_is_waited_for_again(group: HostRanks, place: HostPlace) -> None:
    ranks = [Joined(place, 1), Joined(place, 2)]
    assert len(group.gathered()) == SIZE - 1
    ranks[0].close()
    wait_until(lambda: 1 not in group._ranks)
    with pytest.raises(RankLeftError, match="rank 1 has left"):
        group.start(START, lambda rank, entry: None)
    ranks.append(Joined(place, 1))
    assert len(group.gathered()) == SIZE - 1
    group.start(START, lambda rank, entry: None)
    assert ranks[2].member.started() == START
    for rank in ranks:
        rank.close()


def test_an_entry_for_a_rank_that_is_lost_does_not_harm_who_set_it(group: HostRanks, place: HostPlace) -> None:
    with joined_group(group, place):
        group._closing = True  # so that its reader does not end the group, and rank 1's connection, at once
        group._started[1].steps.close()
        group.pass_on(1, Entry.of("key", b"value"))
        with pytest.raises(ModelError, match="rank 2 is lost"):
            group.tell_entry(Entry.of("key", b"value"))


def test_a_connection_for_kv_that_rank_0_drops_is_made_again(
    group: HostRanks, place: HostPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, dropped = group._take_kv, []

    def drop_first(connection: Connection, hello: Hello) -> None:
        if hello.rank not in dropped:
            dropped.append(hello.rank)
            raise ConnectionLostError("dropped")
        take(connection, hello)

    monkeypatch.setattr(group, "_take_kv", drop_first)
    with joined_group(group, place):
        assert sorted(dropped) == [1, 2]


def test_a_group_that_is_over_takes_no_connection_for_kv(group: HostRanks, place: HostPlace) -> None:
    hello = Hello(version=host_messages.BATON_VERSION, rank=1, size=SIZE, group=TERMS.group)
    with joined_group(group, place):
        first = group._started[0]
        assert first.kv is not None
        first.kv.close()
        first.kv = None
        group.lost = "rank 2 is lost"
        with pytest.raises(RefusedError, match="this group is over"):
            group._take_kv(first.steps, hello)


def test_a_rank_asks_for_its_old_place_for_as_long_as_that_may_be_taken() -> None:
    assert joining._AGAIN_S > host_ranks.LOADING_PATIENCE_S


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_rank_waits_for_rank_0(place: HostPlace, pool: ThreadPoolExecutor) -> None:
    joining_rank = pool.submit(join, replace(place, rank=1))
    threading.Event().wait(0.3)
    with closing(HostRanks(place, TERMS)), closing(joining_rank.result(SOON_S).steps):
        assert joining_rank.result().terms == TERMS


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 2}, "--world-size 2: rank 0 has 3"),
        ({"rank": 3}, "--rank 3: ranks above 0 are 1 to 2"),
        ({"rank": 0}, "--rank 0: ranks above 0 are 1 to 2"),
    ],
)
def test_a_rank_of_another_group_is_refused(
    group: HostRanks, place: HostPlace, changes: dict[str, int], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        join(replace(place, **{"rank": 1, **changes}))  # type: ignore[arg-type]


def test_another_version_is_refused(group: HostRanks, place: HostPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BATON_VERSION", "0.0.1")
    with pytest.raises(ModelError, match=f"rank 0 is Baton {host_messages.BATON_VERSION}, this is 0.0.1"):
        join(replace(place, rank=1))


def test_a_second_rank_of_a_number_is_refused_after_a_while(
    group: HostRanks, place: HostPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_AGAIN_S", 0.2)
    with closing(Joined(place, 1)), pytest.raises(ModelError, match="there is a rank 1 in this group already"):
        join(replace(place, rank=1))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\x01{", b"\x01\x00\x00\x00\x03"]
)
def test_strangers_keep_nobody_out(
    group: HostRanks, place: HostPlace, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_port, "GREETING_S", 1.0)
    with closing(socket.create_connection((place.host, place.port))) as stranger:
        stranger.sendall(sent)
        with closing(join(replace(place, rank=1)).steps):
            stranger.settimeout(SOON_S)
            assert stranger.recv(100) == b"", "it is told nothing"


@pytest.mark.parametrize(
    "hello",
    [
        {"group": "another group"},
        {"group": TERMS.group},  # which has not started
        {"rank": "1"},
        {"rank": True},
        {"size": None},
    ],
)
def test_strange_first_messages_are_refused(group: HostRanks, place: HostPlace, hello: dict[str, object]) -> None:
    first = {"version": host_messages.BATON_VERSION, "rank": 1, "size": SIZE, "group": ""} | hello
    with closing(connect(place.host, place.port, None, most_bytes=1000, patience_s=SOON_S)) as end:
        end.send(Hello(**first).pack())  # type: ignore[arg-type]
        if hello.get("group"):
            with pytest.raises(RefusedError, match="no place for such a connection"):
                Terms.unpack(end.receive())
        else:
            with pytest.raises(ConnectionLostError, match="closed"):
                end.receive()


def test_a_port_that_is_taken_is_named(group: HostRanks, place: HostPlace) -> None:
    with pytest.raises(ModelError, match=f"--group {place.address} is where rank 0 listens: address already in use"):
        HostRanks(place, TERMS)


def test_a_rank_takes_rank_0_s_options_and_keeps_its_own_paths_and_threads() -> None:
    own = EngineConfig(model=Path("elsewhere"), num_threads=3, tensor_parallel_size=2)
    assert engine_of(own, TERMS) == replace(ENGINE, model=own.model, num_threads=3)


def test_an_option_that_contradicts_rank_0_is_refused() -> None:
    own = EngineConfig(model=Path("elsewhere"), kv_cache_dtype=KvCacheDtype.INT8, tensor_parallel_size=2)
    with pytest.raises(ModelError, match="--kv-cache-dtype int8 contradicts rank 0, which has auto"):
        engine_of(own, TERMS)


def test_options_of_another_version_are_refused() -> None:
    with pytest.raises(ModelError, match="another configuration"):
        engine_of(ENGINE, replace(TERMS, engine={**TERMS.engine, "sixth_sense": True}))


def test_a_message_of_nothing_but_brackets_is_strange() -> None:
    with pytest.raises(StrangeMessageError, match="RecursionError"):
        Hello.unpack(bytearray(b"\x01" + b"[" * 60_000))


def test_little_of_a_version_is_repeated(group: HostRanks) -> None:
    with pytest.raises(RefusedError) as caught:
        group._check(Hello(version="9" * 60_000, rank=1, size=SIZE, group=""))
    assert len(str(caught.value)) < 200


def test_a_refusal_is_told_as_it_is() -> None:
    message = bytearray(b"".join(Refused(reason="no", again=True).pack()))
    with pytest.raises(RefusedError, match="no") as caught:
        Terms.unpack(message)
    assert caught.value.again
