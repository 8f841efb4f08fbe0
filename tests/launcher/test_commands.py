"""From one configuration to the children's command lines."""

from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from services import cli
from services.config import (
    REDIS_URL_VARIABLE,
    Device,
    EngineConfig,
    GatewayConfig,
    HandoffMode,
    KvCacheDtype,
    LoadFormat,
    LogFormat,
    Quantization,
    TransportName,
    UpConfig,
    WorkerConfig,
    WorkerRole,
)
from services.launcher import commands


def parsed(arguments: list[str]) -> dict[str, object]:
    """What the command line makes of these arguments."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, TyperGroup)
    command = group.commands[arguments[0]]
    return command.make_context(arguments[0], arguments[1:]).params


ENGINE = EngineConfig(
    model=Path("/models/some model"),
    device=Device.CUDA,
    dtype="bfloat16",
    block_size=32,
    kv_memory_bytes=3 << 20,
    max_model_len=100,
    max_num_seqs=3,
    max_num_batched_tokens=17,
    num_threads=1,
    kernels="torch",
    load_format=LoadFormat.DUMMY,
    quantization=Quantization.FP8,
    kv_cache_dtype=KvCacheDtype.FP8,
    gpu_memory_fraction=0.25,
    split_keys=512,
    worker_index=1,
    num_workers=3,
)


@pytest.mark.parametrize("role", list(WorkerRole))
def test_every_field_of_a_worker_reaches_its_command_line(role: WorkerRole, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(
        role=role,
        engine=ENGINE,
        host="::1",
        port=9,
        transport=TransportName.NIXL,
        allow_plaintext=True,
        redis_url="redis://:secret@r:6379",
        advertised_host="10.0.0.1",
        log_format=LogFormat.JSON,
    )
    arguments = commands.worker_arguments(config)
    assert arguments[0] == role.value
    assert "secret" not in " ".join(arguments)
    for name, value in commands.environment({}, 1, config.redis_url).items():
        monkeypatch.setenv(name, value)
    assert parsed(arguments) == {
        "model": str(ENGINE.model),
        "revision": None,
        "host": "::1",
        "port": 9,
        "transport": "nixl",
        "allow_plaintext": True,
        "redis_url": "redis://:secret@r:6379",
        "advertise_host": "10.0.0.1",
        "log_format": "json",
        "device": "cuda",
        "dtype": "bfloat16",
        "block_size": 32,
        "kv_memory": 3 << 20,
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 17,
        "num_threads": 1,
        "kernels": "torch",
        "load_format": "dummy",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "gpu_memory_fraction": 0.25,
        "attention_split_keys": 512,
        "worker_index": 1,
        "num_workers": 3,
    }


def test_every_field_of_a_gateway_reaches_its_command_line() -> None:
    config = GatewayConfig(
        model=Path("/models/m"),
        served_model_name="name",
        workers=("a:1", "b:2"),
        host="0.0.0.0",
        port=81,
        grpc_port=82,
        handoff=HandoffMode.AUTO,
        handoff_threshold=7,
        generation_overrides={"temperature": 0.25},
        request_timeout_s=2.5,
        max_waiting=8,
        log_format=LogFormat.JSON,
    )
    assert parsed(commands.gateway_arguments(config)) == {
        "model": "/models/m",
        "revision": None,
        "served_model_name": "name",
        "workers": "a:1,b:2",
        "redis_url": None,
        "host": "0.0.0.0",
        "port": 81,
        "grpc_port": 82,
        "handoff": "auto",
        "handoff_threshold": 7,
        "override_generation_config": '{"temperature": 0.25}',
        "request_timeout": 2.5,
        "max_waiting": 8,
        "log_format": "json",
    }


def test_a_stack_without_redis_has_a_gateway_that_knows_the_workers() -> None:
    config = UpConfig(engine=ENGINE, served_model_name="m", num_prefill=1, num_decode=2)
    stack = commands.stack(config, [21001, 21002, 21003], None)
    assert [[child.name for child in step] for step in stack.in_order()] == [
        [],
        ["prefill-0", "decode-0", "decode-1"],
        ["gateway"],
    ]
    known = stack.gateway.command[stack.gateway.command.index("--workers") + 1]
    assert known == "127.0.0.1:21001,127.0.0.1:21002,127.0.0.1:21003"


def test_workers_know_how_many_they_are() -> None:
    """For GPUs, which are dealt out among them."""
    config = UpConfig(engine=EngineConfig(model=Path("m")), served_model_name="m", num_decode=2)
    found = [parsed(list(child.command[4:])) for child in commands.stack(config, [21001, 21002, 21003], None).workers]
    assert [(worker["worker_index"], worker["num_workers"]) for worker in found] == [(0, 3), (1, 3), (2, 3)]


def test_a_stack_with_redis_starts_it_first_and_the_gateway_asks_it() -> None:
    url = commands.redis_url(21003)
    config = UpConfig(engine=ENGINE, served_model_name="m", redis_url=url)
    stack = commands.stack(config, [21001, 21002], 21003)
    assert [child.name for child in stack.in_order()[0]] == ["redis"]
    assert "--workers" not in stack.gateway.command


def test_children_hear_of_no_other_redis_than_the_stack_s() -> None:
    elsewhere = {REDIS_URL_VARIABLE: "redis://elsewhere"}
    assert REDIS_URL_VARIABLE not in commands.environment(elsewhere, 1, None)
    assert commands.environment(elsewhere, 1, "redis://here")[REDIS_URL_VARIABLE] == "redis://here"


def test_workers_that_share_a_machine_do_not_spin_against_each_other() -> None:
    assert commands.environment({}, workers=2, redis_url=None)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in commands.environment({}, workers=1, redis_url=None)
    assert commands.environment({"OMP_WAIT_POLICY": "active"}, workers=2, redis_url=None)["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_the_url_to_paste_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert commands.local_url(host, 80) == url
