"""The options by which a process is a rank of a worker of several hosts."""

import pytest

from services.cli import start
from services.config import REDIS_URL_VARIABLE
from services.config.group import GroupSettings
from services.config.option import Refusal
from services.launcher import random_model
from services.process.configs import WorkerConfig
from tests.cli.test_options import baton

HERE = ("--world-size=3", "--group=127.0.0.1:7700")
AFAR = ("--rank=1", "--world-size=2", "--group=10.0.0.1:7700")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    found: list[WorkerConfig] = []

    def run(config: WorkerConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(start, "run_worker", run)
    monkeypatch.delenv(REDIS_URL_VARIABLE, raising=False)
    return found


@pytest.fixture
def model() -> str:
    return f"--model={random_model.made()}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("more", [(), ("--tensor-parallel-size=3",)])
def test_the_place_of_a_rank_reaches_its_field(
    model: str, configs: list[WorkerConfig], role: str, rank: int, more: tuple[str, ...]
) -> None:
    baton(role, model, f"--rank={rank}", *HERE, *more)
    (config,) = configs
    assert config.hosts == GroupSettings(rank=rank, world_size=3, group="127.0.0.1:7700")
    assert config.hosts.is_led == (rank == 2)
    assert config.workers.engine.tensor_parallel_size == 3, "there is one rank on each host"


def test_a_worker_of_one_host_has_none(model: str, configs: list[WorkerConfig]) -> None:
    baton("decode", model)
    assert configs[0].hosts == GroupSettings()
    assert configs[0].workers.engine.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--rank=0", "--world-size=2"), "--rank, --world-size and --group belong together: name all three"),
        (("--group=127.0.0.1:7700",), "--rank, --world-size and --group belong together: name all three"),
        (("--rank=3", *HERE), "--rank 3: ranks of --world-size 3 are numbered from 0"),
        (("--rank=0", *HERE, "--tensor-parallel-size=2"), "--tensor-parallel-size 2: with --group there is one rank"),
        (("--rank=1", *HERE, "--redis-url=redis://r"), "--redis-url is for rank 0"),
        (("--rank=1", *HERE, "--host=0.0.0.0", "--allow-plaintext"), "--host 0.0.0.0 is no address to go to"),
        (AFAR, "--group 10.0.0.1:7700 needs --mtls or --allow-plaintext"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    model: str, configs: list[WorkerConfig], options: tuple[str, ...], why: str
) -> None:
    with pytest.raises(Refusal, match=f"^{why}"):
        baton("decode", model, *options)
    assert not configs


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("flag", ["--host", "--advertise-host"])
def test_a_rank_whose_kv_no_other_host_could_read_is_refused(
    model: str, configs: list[WorkerConfig], flag: str, host: str
) -> None:
    reached = ("--allow-plaintext", "--host=10.0.0.2", f"{flag}={host}")
    with pytest.raises(Refusal, match=f"^--rank 1 would have decode workers read its KV at {host}, which no other"):
        baton("prefill", model, *AFAR, *reached)
    assert not configs
    baton("decode", model, *AFAR, *reached)  # whose KV nobody reads
    baton("prefill", model, *AFAR, *reached, "--advertise-host=10.0.0.2")
    assert len(configs) == 2


def test_rank_0_may_be_for_its_own_host_alone(model: str, configs: list[WorkerConfig]) -> None:
    baton("prefill", model, "--rank=0", *AFAR[1:], "--allow-plaintext", "--host=127.0.0.1")
    assert configs[0].host == "127.0.0.1"


def test_a_rank_has_a_port_of_its_own(model: str, configs: list[WorkerConfig]) -> None:
    baton("decode", model, "--rank=1", *HERE, "--port=9300", "--host=127.0.0.1", "--advertise-host=10.0.0.2")
    assert (configs[0].port, configs[0].advertised_host) == (9300, "10.0.0.2")


def test_stages_are_of_one_host(model: str, configs: list[WorkerConfig]) -> None:
    with pytest.raises(Refusal, match="--pipeline-parallel-size 2 is for ranks of one host"):
        baton("prefill", model, "--rank=0", *HERE, "--pipeline-parallel-size=2")


def test_plain_text_between_hosts_is_said(
    model: str, configs: list[WorkerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    baton("decode", model, *AFAR, "--allow-plaintext")
    assert configs[0].hosts.group == "10.0.0.1:7700"
    assert "plain text at --group 10.0.0.1:7700" in capsys.readouterr().err


def test_the_environment_s_redis_is_for_rank_0(
    model: str, configs: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, "redis://r")
    baton("decode", model, "--rank=0", *HERE)
    baton("decode", model, "--rank=1", *HERE)
    assert [config.process.redis_url for config in configs] == ["redis://r", None]
