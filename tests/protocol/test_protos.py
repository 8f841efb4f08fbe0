"""The generated code that is committed is what the .proto files say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with code generated just now, as `make proto` does it.

    In a process of its own: grpc_tools and nixl in one process crash when the second is loaded.
    """
    out = tmp_path_factory.mktemp("protos")
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    assert sources
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs]
    subprocess.run([*command, *(str(ROOT / source) for source in sources)], check=True)
    return out / "protos"


def generated_files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("*_pb2*.py*"))}


def test_committed_code_is_what_the_protos_generate(regenerated: Path) -> None:
    """When this fails: `make proto`, and commit what it wrote."""
    assert generated_files(ROOT / "protos") == generated_files(regenerated)
