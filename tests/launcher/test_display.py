"""The ready lines of `baton up` say who may come in, and show no key."""

from pathlib import Path

import pytest

from services.config.engine import EngineConfig
from services.launcher.display import ready_lines
from services.process.configs import ServingSettings, UpConfig, WorkerSettings

WORKERS = WorkerSettings(engine=EngineConfig(model=Path("m")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "none: who reaches the port may use it"),
        ({"api_keys": ("a-secret-key",)}, "those of BATON_API_KEY"),
        ({"keys_file": Path("/etc/keys.json")}, "those of /etc/keys.json"),
    ],
)
def test_the_line_about_keys(settings: dict[str, object], said: str) -> None:
    lines = ready_lines(UpConfig(workers=WORKERS, serving=ServingSettings(served_model_name="m", **settings)))  # type: ignore[arg-type]
    assert f"keys            {said}" in lines.splitlines()
    assert ("Authorization: Bearer KEY" in lines) == bool(settings)
    assert "a-secret-key" not in lines
    assert "http://127.0.0.1:9001/metrics" in lines
