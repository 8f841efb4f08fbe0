"""A worker of two hosts, which are networks with a link: it serves, and ends where the link loses all packets."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.engine.runner.group.hosts.host_ranks import SERVING_PATIENCE_S
from services.engine.runner.group.hosts.place import HostPlace
from services.launcher.authority import Authority
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.engine.group.hosts.rank_process import RankOnHost, rank_on_host
from tests.faults.namespace import lay_bridge, linked_network, num_sent, private_network
from tests.machine import NAMESPACES, miss, needs

pytestmark = [needs(NAMESPACES), pytest.mark.long]

FIRST, SECOND, LINK = "10.78.0.1", "10.78.0.2", "second"
PORT, HEALTH_PORT = 7700, 7701
WITHIN_S = 6.0  # of a loss, on a loaded machine; an idle one takes half of it
SOON_S = 20.0
_LOSE = "table inet lost { chain input { type filter hook input priority 0; ip saddr 10.78.0.0/24 drop; }; }"


@dataclass(frozen=True)
class Link:
    """The first network, which is this thread's, and the way into the second."""

    second: Callable[[], None]

    def lose_all_that_comes_to(self, host: str) -> None:
        enter = self.second if host == SECOND else None
        subprocess.run(["nft", _LOSE], check=True, preexec_fn=enter)


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("nft") is None:
        miss("nft is not installed: apt install nftables")
    with private_network():
        lay_bridge(f"{FIRST}/24")
        with linked_network(LINK, f"{SECOND}/24") as second:
            yield Link(second)


@pytest.fixture(params=["plain", "TLS"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    if request.param == "plain":
        return ("--allow-plaintext",)
    paths = Certificates(Authority(), tmp_path).paths(CertificateRole.WORKER, CertificateRole.DECODE)
    return "--mtls", str(paths.chain.parent)


@contextmanager
def serving(link: Link, model: Path, logs: Path, security: tuple[str, ...]) -> Iterator[tuple[RankOnHost, RankOnHost]]:
    place = HostPlace(rank=0, size=2, host=FIRST, port=PORT)
    small = ("--kv-memory", "4MiB", "--max-model-len", "256", "--host", FIRST)
    health = ("--host", SECOND, "--health-port", f"{HEALTH_PORT}")
    with (
        rank_on_host(place, model, logs / "1.log", *security, *health, enter=link.second) as other,
        rank_on_host(place, model, logs / "0.log", *security, *small, rank=0) as leading,
    ):
        for rank in (leading, other):
            rank.until_logged("ready")
        yield leading, other


def test_the_self_check_adds_up_over_the_link_and_all_end_with_rank_0(
    link: Link, tmp_path: Path, model: Path, security: tuple[str, ...]
) -> None:
    """A worker is ready when its self-check has run a prompt on both hosts."""
    before = num_sent(LINK)
    with serving(link, model, tmp_path, security) as (leading, other):
        assert num_sent(LINK) - before > 64 * 96 * 2 * 2, "sums go over the link"
        leading.process.send_signal(signal.SIGTERM)
        assert leading.process.wait(SOON_S) == 0
        assert other.process.wait(SOON_S) == 0


@pytest.mark.parametrize("deaf", [FIRST, SECOND])
def test_a_host_that_hears_nothing_ends_the_worker_within_seconds(
    link: Link, tmp_path: Path, model: Path, security: tuple[str, ...], deaf: str
) -> None:
    with serving(link, model, tmp_path, security) as ranks:
        began = time.monotonic()
        link.lose_all_that_comes_to(deaf)
        for rank in ranks:
            assert rank.process.wait(SOON_S) == 1
        assert time.monotonic() - began < 2 * WITHIN_S
        assert any(f"is lost: nothing came for {SERVING_PATIENCE_S} s" in rank.log for rank in ranks)
