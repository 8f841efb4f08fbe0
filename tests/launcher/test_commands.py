"""From one configuration to the children's configurations, command lines and environment."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from services.config import (
    API_KEY_VARIABLE,
    KEYS_VARIABLE,
    REDIS_URL_VARIABLE,
    DeviceKind,
    Dtype,
    HandoffMode,
    Kernels,
    KvCacheDtype,
    LoadFormat,
    LogFormat,
    Quantization,
    TransportName,
    WorkerRole,
)
from services.config.engine import EngineConfig
from services.launcher import certificates, commands
from services.launcher.authority import Authority
from services.launcher.child import ChildSpec, Place
from services.process import child_config
from services.process.configs import (
    GatewayConfig,
    ProcessSettings,
    ServingSettings,
    UpConfig,
    WorkerConfig,
    WorkerSettings,
)
from services.tls.roles import CertificateRole

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def taken(child: ChildSpec, kind: type[T]) -> T:
    """The configuration that the child finds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in child.environment.items():
            patch.setenv(name, value)
        return child_config.take(kind)


ENGINE = EngineConfig(
    model=Path("/models/some model"),
    device=DeviceKind.CUDA,
    dtype=Dtype.BFLOAT16,
    block_size=32,
    kv_memory_bytes=3 << 20,
    max_model_len=100,
    max_num_seqs=3,
    max_num_batched_tokens=17,
    num_threads=1,
    kernels=Kernels.TORCH,
    load_format=LoadFormat.DUMMY,
    quantization=Quantization.FP8,
    kv_cache_dtype=KvCacheDtype.FP8,
    gpu_memory_fraction=0.25,
    split_keys=512,
    worker_index=1,
    num_workers=3,
)


SERVING = ServingSettings(
    served_model_name="name",
    host="0.0.0.0",
    port=81,
    grpc_port=82,
    admin_host="10.0.0.1",
    admin_port=83,
    api_keys=("secret-key",),
    keys_file=Path("/etc/keys.json"),
    handoff=HandoffMode.NEVER,
    handoff_threshold=7,
    generation_overrides={"temperature": 0.25},
    request_timeout_s=2.5,
)
PROCESS = ProcessSettings(redis_url="redis://:secret@r:6379", log_format=LogFormat.JSON, logged_gc_types=3)
WORKERS = WorkerSettings(engine=ENGINE, transport=TransportName.NIXL)
UP = UpConfig(serving=SERVING, workers=WORKERS, process=PROCESS, num_prefill=1, num_decode=2)
PORTS = [21001, 21002, 21003]
FDS = commands.GatewayFds(http=7, admin=8)


def test_every_field_of_a_worker_reaches_the_child() -> None:
    children = commands.stack(UP, PORTS, None, FDS).workers
    roles = [WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE]
    for index, (child, role) in enumerate(zip(children, roles, strict=True)):
        engine = replace(ENGINE, worker_index=index, num_workers=3)
        expected = WorkerConfig(
            role=role,
            host="127.0.0.1",
            port=PORTS[index],
            workers=replace(WORKERS, engine=engine),
            process=PROCESS,
        )
        assert taken(child, WorkerConfig) == expected


def test_every_field_of_a_gateway_reaches_the_child() -> None:
    expected = GatewayConfig(model=ENGINE.model, serving=SERVING, process=PROCESS, http_fd=7, admin_fd=8)
    assert taken(commands.stack(UP, PORTS, None, FDS).gateway, GatewayConfig) == expected


@pytest.mark.parametrize(
    "config",
    [
        GatewayConfig(
            model=Path("m"),
            serving=SERVING,
            process=PROCESS,
            worker_addresses=("a:1", "b:2"),
            max_waiting=8,
            http_fd=5,
            admin_fd=6,
        ),
        WorkerConfig(role=WorkerRole.DECODE, port=9, workers=WORKERS, allow_plaintext=True, advertised_host="10.0.0.1"),
        WorkerConfig(role=WorkerRole.PREFILL, port=9, workers=WorkerSettings(engine=EngineConfig(model=Path("m")))),
        GatewayConfig(model=Path("m"), serving=ServingSettings(served_model_name="name")),
    ],
    ids=["gateway", "worker", "worker with defaults", "gateway with defaults"],
)
def test_a_configuration_comes_out_as_it_went_in(
    config: GatewayConfig | WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in child_config.environment(config).items():
        monkeypatch.setenv(name, value)
    found = child_config.take(type(config))
    assert repr(found) == repr(config)  # types too: an enum's member is equal to its text


def test_each_process_has_a_certificate_of_its_own_role(tmp_path: Path) -> None:
    """And the launcher one that can ask workers. The gateway shows clients another one."""
    certificates.make(tmp_path, "127.0.0.1")
    config = commands.with_certificates(replace(UP, process=ProcessSettings()), tmp_path)
    stack = commands.stack(config, PORTS, None, FDS)
    roles = [taken(child, WorkerConfig).process.mtls for child in stack.workers]
    assert roles == [tmp_path / "prefill", tmp_path / "decode", tmp_path / "decode"]
    gateway = taken(stack.gateway, GatewayConfig)
    assert (gateway.process.mtls, gateway.serving.tls_cert) == (tmp_path / "gateway", tmp_path / "clients" / "tls.crt")
    assert commands.api_url(config.serving) == "https://127.0.0.1:81"


def test_a_certificate_that_the_user_names_is_everybody_s(tmp_path: Path) -> None:
    names = [role.dns_name for role in CertificateRole]
    mtls = Authority().issue(names, tmp_path).chain.parent
    stack = commands.stack(replace(UP, process=ProcessSettings(mtls=mtls)), PORTS, None, FDS)
    assert {taken(child, WorkerConfig).process.mtls for child in stack.workers} == {mtls}
    assert taken(stack.gateway, GatewayConfig).process.mtls == mtls


def test_command_lines_have_role_and_port_and_no_secret() -> None:
    stack = commands.stack(UP, PORTS, None, FDS)
    lines = [" ".join(child.command) for child in (*stack.workers, stack.gateway)]
    ends = [f"services.cli prefill --port {PORTS[0]}"]
    ends += [f"services.cli decode --port {port}" for port in PORTS[1:]]
    ends += [f"services.cli gateway --port {SERVING.port}"]
    assert [line.endswith(f"{end} {child_config.FLAG}") for line, end in zip(lines, ends, strict=True)] == [True] * 4
    assert "secret" not in "".join(lines)


def test_a_process_without_a_parent_s_configuration_says_so() -> None:
    command = [sys.executable, "-m", "services.cli", "gateway", "--port", "1", child_config.FLAG]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    refusal = "baton: --config-from-parent is for processes that `baton up` starts\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", refusal)


def test_a_stack_without_redis_has_a_gateway_that_knows_the_workers() -> None:
    stack = commands.stack(replace(UP, process=ProcessSettings()), PORTS, None, FDS)
    assert [[child.name for child in step] for step in stack.in_order()] == [
        [],
        ["prefill-0", "decode-0", "decode-1"],
        ["gateway"],
    ]
    known = taken(stack.gateway, GatewayConfig).worker_addresses
    assert known == ("127.0.0.1:21001", "127.0.0.1:21002", "127.0.0.1:21003")


def test_workers_know_how_many_they_are() -> None:
    """For GPUs, which are dealt out among them."""
    config = replace(UP, workers=WorkerSettings(engine=EngineConfig(model=Path("m"))))
    found = [taken(child, WorkerConfig).workers.engine for child in commands.stack(config, PORTS, None, FDS).workers]
    assert [(engine.worker_index, engine.num_workers) for engine in found] == [(0, 3), (1, 3), (2, 3)]


def test_workers_that_come_later_have_ports_of_their_own_and_the_share_of_the_start() -> None:
    growth = commands.stack(UP, PORTS, None, FDS).growth
    assert growth is not None
    later = growth.specs([Place(WorkerRole.PREFILL, 1, 3), Place(WorkerRole.DECODE, 4, 1)])
    assert [child.name for child in later] == ["prefill-1", "decode-4"]
    found = [taken(child, WorkerConfig) for child in later]
    assert len({worker.port for worker in found} - set(PORTS)) == 2
    for worker, role, index in zip(found, (WorkerRole.PREFILL, WorkerRole.DECODE), (3, 1), strict=True):
        engine = replace(ENGINE, worker_index=index, num_workers=3)
        workers = replace(WORKERS, engine=engine)
        assert worker == WorkerConfig(role=role, port=worker.port, workers=workers, process=PROCESS)


def test_a_successor_has_the_place_of_the_worker_that_it_replaces_and_another_port() -> None:
    worker = commands.stack(UP, PORTS, None, FDS).workers[1]
    assert worker.successor is not None
    successor = worker.successor()
    assert (successor.name, successor.place) == (worker.name, worker.place)
    assert (worker.name, worker.place) == ("decode-0", Place(WorkerRole.DECODE, 0, 1))
    old, new = taken(worker, WorkerConfig), taken(successor, WorkerConfig)
    assert new.port not in PORTS
    assert replace(new, port=old.port) == old


def test_a_stack_without_redis_has_the_workers_of_its_start_and_no_others() -> None:
    stack = commands.stack(replace(UP, process=ProcessSettings()), PORTS, None, FDS)
    assert stack.growth is None
    assert {worker.successor for worker in stack.workers} == {None}


def test_a_stack_with_redis_starts_it_first_and_the_gateway_asks_it() -> None:
    socket = Path("/run/user/1/baton-1/redis.sock")
    config = commands.with_redis(replace(UP, process=ProcessSettings()), socket)
    stack = commands.stack(config, PORTS, socket, FDS)
    assert [child.name for child in stack.in_order()[0]] == ["redis"]
    gateway = taken(stack.gateway, GatewayConfig)
    assert (gateway.process.redis_url, gateway.worker_addresses) == (f"unix://{socket}", ())


def test_children_hear_of_no_other_redis_than_the_stack_s() -> None:
    elsewhere = {REDIS_URL_VARIABLE: "redis://elsewhere"}
    assert REDIS_URL_VARIABLE not in commands.environment(elsewhere, 1)
    stack = commands.stack(UP, PORTS, None, FDS)
    urls = {taken(child, WorkerConfig).process.redis_url for child in stack.workers}
    assert urls | {taken(stack.gateway, GatewayConfig).process.redis_url} == {PROCESS.redis_url}


def test_nixl_of_workers_of_one_machine_listens_on_loopback_alone() -> None:
    assert commands.environment({}, 2)["UCX_NET_DEVICES"] == "lo"
    assert commands.environment({"UCX_NET_DEVICES": "all"}, 2)["UCX_NET_DEVICES"] == "all"


def test_workers_hear_of_no_key() -> None:
    """The gateway has the keys in its configuration."""
    given = {API_KEY_VARIABLE: "secret-key", KEYS_VARIABLE: "/etc/keys.json"}
    stack = commands.stack(UP, PORTS, None, FDS)
    for worker in stack.workers:
        assert "secret-key" not in str({**commands.environment(given, 1), **worker.environment})
    assert taken(stack.gateway, GatewayConfig).serving.api_keys == ("secret-key",)


def test_workers_that_share_a_machine_do_not_spin_against_each_other() -> None:
    assert commands.environment({}, workers=2)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in commands.environment({}, workers=1)
    assert commands.environment({"OMP_WAIT_POLICY": "active"}, workers=2)["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:80"), ("0.0.0.0", "127.0.0.1:80"), ("::", "[::1]:80")],
)
def test_the_urls_to_paste_are_those_that_this_machine_reaches(host: str, address: str) -> None:
    plain = ServingSettings(served_model_name="tiny", host=host, port=80, admin_host=host, admin_port=80)
    assert commands.api_url(plain) == commands.admin_url(plain) == f"http://{address}"
    tls = replace(plain, tls_cert=Path("c"), tls_key=Path("k"))
    assert commands.api_url(tls) == commands.admin_url(tls) == f"https://{address}"
