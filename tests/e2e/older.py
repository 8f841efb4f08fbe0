"""An older version of Baton, taken out of the history, and its processes.

COMMIT has today's major versions of the protocol and of KV. It knows drains and `baton restart`, and nothing of forms,
embeddings, salts and what else came after it.
"""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from services.process import lifeline
from tests.e2e.stack import Endpoint

COMMIT = "f437811f08df1bbeed9538f15782477951b544ea"
_PACKAGES = ("services", "kvtransfer", "protos", "loadtest")
_REPOSITORY = Path(__file__).parents[2]


class Older:
    """The packages of COMMIT in a folder. They run in this interpreter, with today's versions of other packages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `baton` with these arguments. It ends with this process."""
        command = [sys.executable, "-m", "services.cli", *arguments]
        return subprocess.Popen(command, env=self._environment | lifeline.environment(), cwd=self._directory)

    def output_of(self, program: Path) -> str:
        """Returns what a program prints that imports the older packages."""
        command = [sys.executable, str(program)]
        return subprocess.run(
            command, env=self._environment, cwd=self._directory, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self._directory)}


def take_out(directory: Path) -> Older | None:
    """Unpacks COMMIT into a folder; None where its history is not at hand."""
    command = ["git", "-C", str(_REPOSITORY), "archive", "--format=tar", COMMIT, *_PACKAGES]
    try:
        archive = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return Older(directory)


class OlderGateway(Endpoint):
    """A gateway of COMMIT, which has all its routes at one port."""

    def __init__(self, older: Older, model: Path, addresses: str) -> None:
        super().__init__()
        self.admin_port = self.port
        ports = ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        options = ["--workers", addresses, "--served-model-name", "tiny", "--handoff", "always"]
        self.process = older.start("gateway", "--model", str(model), *ports, *options)

    def close(self) -> None:
        """Ends it, where it has not ended yet."""
        self.client.close()
        self.process.kill()
        self.process.wait()
