"""Which model `baton up` serves where none is named, and what it says of it."""

import sys
from pathlib import Path

import pytest

from services.config.engine import EngineConfig
from services.launcher import demo_model, random_model
from services.launcher.banner import ready_lines
from services.process.configs import ServingSettings, UpConfig, WorkerSettings

ROOT = Path(__file__).parents[2]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> Path:
    """A package like the wheel's, which cannot be imported: what it depends on is not there."""
    package = folder / "a_wheel_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module\n")
    for name in files:
        (package / name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(demo_model, "_PACKAGE", package.name)
    return package


def test_the_trained_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(tmp_path, monkeypatch, demo_model._FILE)
    found = demo_model.find()
    assert (found.path, found.is_random) == (package / demo_model._FILE, False)
    assert "Apache License 2.0" in found.note
    assert package.name not in sys.modules


@pytest.mark.parametrize("files", [(), ("another.gguf",)])
def test_without_it_the_random_model_serves_and_says_why(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, *files)
    found = demo_model.find()
    assert (found.path, found.is_random) == (random_model.directory(), True)
    assert demo_model.INSTALL in found.note
    monkeypatch.setattr(demo_model, "_PACKAGE", "no_such_package")
    assert demo_model.find() == found


def test_the_banner_says_which_model_serves() -> None:
    workers, serving = WorkerSettings(engine=EngineConfig(model=Path("m"))), ServingSettings(served_model_name="name")
    config = UpConfig(workers=workers, serving=serving, model_note="whose it is")
    assert "model           name (whose it is)" in ready_lines(config).splitlines()
    assert "model           name" in ready_lines(UpConfig(workers=workers, serving=serving)).splitlines()


def test_the_version_is_the_one_that_is_tested() -> None:
    assert demo_model.INSTALL.rpartition(" ")[2] in (ROOT / "constraints.txt").read_text().splitlines()
