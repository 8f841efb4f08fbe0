"""A model on ranks that are hosts, at loopback: what they compute together, and how they end together."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.config import Kernels, KvCacheDtype
from services.config.engine import EngineConfig
from services.engine.kernels.ranks import RankLostError
from services.engine.runner.group.hosts.host_ranks import SERVING_PATIENCE_S
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.load import LoadedModel, load_runner
from services.launcher.authority import Authority
from services.protocol.model_files.base import ModelError
from services.tls.files import CertificateFiles
from services.tls.rank_contexts import RankTls
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.checkpoints import write_checkpoint
from tests.engine.group.hosts.rank_process import RankOnHost, rank_on_host
from tests.engine.group.test_group_runner import a_step, engine_of, numbers_of, run

pytestmark = pytest.mark.long

WITHIN_S = 6.0  # of a loss, on a loaded machine; an idle one takes half of it
SOON_S = 20.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(Authority(), tmp_path_factory.mktemp("certificates"))


def a_place(size: int = 2, tls: RankTls | None = None) -> HostPlace:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return HostPlace(rank=0, size=size, host="127.0.0.1", port=free.getsockname()[1], tls=tls)


@contextmanager
def loaded_on(engine: EngineConfig, place: HostPlace) -> Iterator[LoadedModel]:
    loaded = load_runner(replace(engine, tensor_parallel_size=place.size), place=place)
    try:
        yield loaded
    finally:
        loaded.runner.close()  # type: ignore[attr-defined]


def go_on(group: LoadedModel) -> None:
    while True:
        run(group.runner, a_step(np.arange(40), 0))


def assert_the_same(model: Path, tmp_path: Path, place: HostPlace, *options: str, **changes: Any) -> None:
    engine = engine_of(model, **changes)
    one = load_runner(engine)
    expected = numbers_of(one.runner, one.vocab_size)
    others = [
        rank_on_host(place, model, tmp_path / f"{rank}.log", *options, rank=rank) for rank in range(1, place.size)
    ]
    started: list[RankOnHost] = [other.__enter__() for other in others]
    try:
        with loaded_on(engine, place) as several:
            assert several.fingerprint == one.fingerprint
            assert several.runner.layout == one.runner.layout
            assert several.weights.num_bytes > 0
            tokens, numbers = numbers_of(several.runner, several.vocab_size)
            several.runner.copy_block(0, 7)
        assert tokens == expected[0]
        assert numbers == pytest.approx(expected[1], abs=1e-4)
        assert [rank.process.wait(SOON_S) for rank in started] == [0] * (place.size - 1)
    finally:
        for other in others:
            other.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("size", "changes"),
    [(2, {}), (3, {}), (2, {"kernels": Kernels.TORCH}), (2, {"kv_cache_dtype": KvCacheDtype.INT8})],
)
def test_hosts_compute_what_one_process_does(model: Path, tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    assert_the_same(model, tmp_path, a_place(size), **changes)


def test_they_do_over_tls(model: Path, tmp_path: Path, certificates: Certificates) -> None:
    paths = certificates.paths(CertificateRole.WORKER, CertificateRole.DECODE)
    place = a_place(tls=RankTls(CertificateFiles(paths), CertificateRole.DECODE))
    assert_the_same(model, tmp_path, place, "--mtls", str(paths.chain.parent))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kernels", list(Kernels))
def test_a_lost_rank_ends_the_step_within_a_second_or_so(
    model: Path, tmp_path: Path, how: signal.Signals, kernels: Kernels
) -> None:
    place, told = a_place(), Future[str]()
    with (
        rank_on_host(place, model, tmp_path / "log") as rank,
        loaded_on(engine_of(model, kernels=kernels), place) as group,
    ):
        assert group.group is not None
        group.group.when_lost(told.set_result)
        run(group.runner, a_step(np.arange(40), 0))
        began = time.monotonic()
        os.kill(rank.process.pid, how)
        words = "closed|reset" if how is signal.SIGKILL else f"nothing came for {SERVING_PATIENCE_S} s"
        with pytest.raises(RankLostError, match=f"rank 1 is lost: .*({words})"):
            go_on(group)
        assert time.monotonic() - began < WITHIN_S
        assert "rank 1" in told.result(SOON_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_rank_0_and_join_the_next_one(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Both are processes here. The group is whole again when both have been started again."""
    place = a_place()
    rank_0 = ("--kv-memory", "4MiB", "--max-model-len", "256", "--port", f"{a_place().port}")
    with (
        rank_on_host(place, model, tmp_path / "1.log") as first,
        rank_on_host(place, model, tmp_path / "0.log", *rank_0, rank=0) as leading,
    ):
        leading.until_logged("ready")
        first.until_logged("ready")
        began = time.monotonic()
        os.kill(leading.process.pid, how)
        assert first.process.wait(SOON_S) == 1
        assert time.monotonic() - began < WITHIN_S
        assert "this rank ends" in first.log
        with rank_on_host(place, model, tmp_path / "again.log") as again:
            again.until_logged("waiting for rank 0")  # nobody listens, or nobody answers
            leading.end()
            with rank_on_host(place, model, tmp_path / "next.log", *rank_0, rank=0) as following:
                following.until_logged("ready")
                again.until_logged("ready")
                following.process.send_signal(signal.SIGTERM)
                assert following.process.wait(SOON_S) == 0
                assert again.process.wait(SOON_S) == 0


def test_a_first_signal_is_left_to_rank_0_and_a_second_ends_the_rank(model: Path, tmp_path: Path) -> None:
    place = a_place()
    with (
        rank_on_host(place, model, tmp_path / "log") as rank,
        loaded_on(engine_of(model), place) as group,
    ):
        rank.until_logged("ready")
        rank.process.send_signal(signal.SIGTERM)
        rank.until_logged("this rank ends when rank 0 does")
        run(group.runner, a_step(np.arange(40), 0))
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(SOON_S) == 1


def test_a_rank_that_waits_for_rank_0_ends_at_a_signal(model: Path, tmp_path: Path) -> None:
    with rank_on_host(a_place(), model, tmp_path / "log") as rank:
        rank.until_logged("waiting for rank 0")
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(SOON_S) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--max-model-len", "100"), "--max-model-len 100 contradicts rank 0, which has 256"),
        (("--kernels", "torch"), "--kernels torch contradicts rank 0, which has auto"),
        (("--load-format", "dummy"), "--load-format dummy contradicts rank 0, which has auto"),
    ],
)
def test_a_rank_of_other_options_is_refused_in_words_and_rank_0_waits_on(
    model: Path, tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    assert_refused_first(model, model, tmp_path, options, why)


def test_a_rank_of_another_model_is_refused_in_words(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, "llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96, num_hidden_layers=1)
    assert_refused_first(model, other, tmp_path, (), "is another model than rank 0's")


def assert_refused_first(model: Path, other: Path, tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    """A wrong rank comes first; the right one after it completes the group."""
    place, loaded = a_place(), Future[LoadedModel]()
    engine = engine_of(model, tensor_parallel_size=2)
    threading.Thread(target=lambda: loaded.set_result(load_runner(engine, place=place)), daemon=True).start()
    with rank_on_host(place, other, tmp_path / "wrong.log", *options) as wrong:
        assert wrong.process.wait(SOON_S) == 1
        assert why in wrong.log
        assert not loaded.done()
    with rank_on_host(place, model, tmp_path / "log"):
        group = loaded.result(SOON_S)
        run(group.runner, a_step(np.arange(40), 0))
        group.runner.close()  # type: ignore[attr-defined]


def test_a_model_that_is_not_there_is_refused_before_rank_0_is_looked_for(tmp_path: Path) -> None:
    with rank_on_host(a_place(), tmp_path / "nothing", tmp_path / "log") as rank:
        assert rank.process.wait(SOON_S) == 2 or rank.process.returncode == 1
        assert "nothing" in rank.log


def test_a_taken_port_is_named(model: Path) -> None:
    place = a_place()
    with (
        closing(socket.create_server((place.host, place.port))),
        pytest.raises(ModelError, match="is where rank 0 listens: address already in use"),
    ):
        load_runner(engine_of(model, tensor_parallel_size=2), place=place)
