"""The units in docs/systemd: systemd knows their settings, and their commands are options of Baton."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from services.cli import commands, start
from services.cli.commands import app
from services.tls.roles import CertificateRole
from tests.gateway.keys.key_files import write_keys

FOLDER = Path(__file__).parents[2] / "docs" / "systemd"
UNITS = {path.stem.removeprefix("baton-"): path.read_text() for path in sorted(FOLDER.glob("*.service"))}
VARIABLES = dict(line.split("=", 1) for line in (FOLDER / "baton.env").read_text().splitlines() if line[:1] != "#")


def command(unit: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    return shlex.split(re.sub(r"\$\{(\w+)\}", lambda name: VARIABLES[name[1]], line))


def test_there_is_one_for_each_kind_of_process() -> None:
    assert UNITS.keys() == {"gateway", "prefill", "decode"}


@pytest.mark.parametrize("name", UNITS)
def test_the_command_of_a_unit_is_one_of_baton_s(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Any] = []

    def keep(config: Any) -> int:
        found.append(config)
        return 0

    for name_of_start in ("run_gateway", "run_worker"):
        monkeypatch.setattr(start, name_of_start, keep)
    monkeypatch.setattr(commands, "find_model", lambda model, revision, weights=True: (Path(model), model))
    monkeypatch.setenv("BATON_REDIS_URL", VARIABLES["BATON_REDIS_URL"])
    keys = str(write_keys(tmp_path / "keys.json").path)
    program, *arguments = (each.replace("/etc/baton/keys.json", keys) for each in command(UNITS[name]))
    assert program == "/opt/baton/bin/baton"
    typer.main.get_command(app).main(arguments, prog_name="baton", standalone_mode=False)
    (config,) = found
    assert config.process.mtls == Path("/etc/baton", CertificateRole(name).value)
    assert config.process.redis_url == VARIABLES["BATON_REDIS_URL"]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNITS[name], re.MULTILINE)
    assert int(stop) > config.process.drain_timeout_s


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """Where it is installed. The program of the units is not."""
    analyze = shutil.which("systemd-analyze")
    for name, text in UNITS.items():
        file = tmp_path / f"baton-{name}.service"
        file.write_text(text.replace("/opt/baton/bin/baton", "/bin/true"))
        if analyze is not None:
            result = subprocess.run([analyze, "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
            assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
