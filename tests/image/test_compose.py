"""compose.yaml is held to the Dockerfile and to the options of the commands; no test runs it."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from services.cli import commands, start
from services.cli.commands import app
from services.config import WorkerRole
from services.process.configs import GatewayConfig, WorkerConfig

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OURS = ("prefill", "decode", "gateway")
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def service(name: str, **variables: str) -> dict[str, Any]:
    """A service as Docker would see it, where the shell has these variables."""
    text = VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], yaml.safe_dump(COMPOSE["services"][name]))
    described: dict[str, Any] = yaml.safe_load(text)
    return described


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that the containers' processes would run with."""
    found: list[Any] = []

    def keep(config: Any) -> int:
        found.append(config)
        return 0

    for name_of_start in ("run_gateway", "run_worker"):
        monkeypatch.setattr(start, name_of_start, keep)
    monkeypatch.setattr(commands, "find_model", lambda model, revision, weights=True: (Path("/models"), model))
    return found


def run(name: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    described = service(name, **variables)
    for variable, value in described["environment"].items():
        monkeypatch.setenv(variable, value or "")
    typer.main.get_command(app).main(described["command"], prog_name="baton", standalone_mode=False)


def test_the_commands_are_options_of_baton_and_their_ports_are_those_asked_for_health(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OURS:
        run(name, monkeypatch)
    prefill, decode, gateway = started
    assert isinstance(prefill, WorkerConfig)
    assert isinstance(decode, WorkerConfig)
    assert isinstance(gateway, GatewayConfig)
    assert (prefill.role, decode.role) == (WorkerRole.PREFILL, WorkerRole.DECODE)
    ports = {"prefill": prefill.port, "decode": decode.port, "gateway": gateway.serving.port}
    for name, config in zip(OURS, started, strict=True):
        assert f"127.0.0.1:{ports[name]}" in service(name)["healthcheck"]["test"][-1]
        assert config.process.redis_url == "redis://redis:6379"
    assert (prefill.advertised_host, decode.advertised_host) == ("prefill", "decode")
    published = [mapping.split(":")[1:] for mapping in service("gateway")["ports"]]
    assert published == [[str(port)] * 2 for port in (gateway.serving.port, gateway.serving.grpc_port)]
    assert all(mapping.startswith("127.0.0.1:") for mapping in service("gateway")["ports"])
    assert gateway.serving.admin_host == "127.0.0.1"
    assert gateway.serving.api_keys == ()


def test_variables_of_the_shell_reach_the_processes(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run("gateway", monkeypatch, BATON_API_KEY="one,two", BATON_MODEL="org/other")
    run("decode", monkeypatch, BATON_THREADS="7")
    gateway, decode = started
    assert gateway.serving.api_keys == ("one", "two")
    assert gateway.serving.served_model_name == "org/other"
    assert decode.workers.engine.num_threads == 7


@pytest.mark.parametrize("name", OURS)
def test_a_container_is_what_the_dockerfile_makes(name: str) -> None:
    described = service(name)
    assert re.search(rf"^FROM \w+ AS {described['build']['target']}$", DOCKERFILE, re.MULTILINE)
    assert {*described["build"]["args"]} <= {*re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)}
    writable = {volume.partition(":")[2] for volume in described["volumes"]} | {described["tmpfs"]}
    (declared,) = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert writable == set(yaml.safe_load(declared))
    assert {volume.partition(":")[0] for volume in described["volumes"]} == COMPOSE["volumes"].keys()
    assert described["read_only"] is True
    assert re.search(r'^ENTRYPOINT \["baton"\]$', DOCKERFILE, re.MULTILINE)


def test_what_a_service_waits_for_has_a_health_check() -> None:
    for described in COMPOSE["services"].values():
        for other in described.get("depends_on", {}):
            assert "healthcheck" in COMPOSE["services"][other]


def test_the_health_checks_are_python_that_runs() -> None:
    for name in OURS:
        kind, program, option, source = service(name)["healthcheck"]["test"]
        assert (kind, program, option) == ("CMD", "python", "-c")
        compile(source, name, "exec")
