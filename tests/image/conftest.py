"""The images that the Dockerfile describes, built without an engine."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.build import Build
from tests.image.dockerfile import read_dockerfile
from tests.image.pip_settings import read_pip_settings
from tests.image.roots import make_base, missing_tools


@pytest.fixture(scope="session")
def directory() -> Iterator[Path]:
    """A folder that every user can read, for roots of some gigabytes. Pytest's own would be kept."""
    made = Path(tempfile.mkdtemp(prefix="baton-image-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def build(directory: Path) -> Build:
    """Who asks for it wants it: what the machine lacks for it is an error, not a skip."""
    missing = missing_tools()
    assert not missing, f"this machine lacks: {', '.join(missing)}"
    make_base(directory / "base")
    return Build(read_dockerfile(), directory / "base", directory, read_pip_settings())


@pytest.fixture(scope="session")
def volumes(directory: Path) -> Path:
    """A folder for the volumes of containers."""
    made = directory / "volumes"
    made.mkdir()
    return made
