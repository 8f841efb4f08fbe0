"""Baton as `baton up` starts it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.compare.servers import KV_GIB, MAX_MODEL_LEN, MODEL_NAME, Launch
from loadtest.http_stream import Address
from loadtest.processes import Process


@dataclass(frozen=True, slots=True)
class Baton:
    """One pair behind a gateway. handoff: `always`, `auto` or `never`."""

    model: Path
    handoff: str
    num_ports: int = 3

    @property
    def name(self) -> str:
        """See `Server.name`."""
        return f"baton-{self.handoff}"

    @property
    def setting(self) -> str:
        """See `Server.setting`."""
        return f"baton up --handoff {self.handoff}, one prefill and one decode worker, KV {KV_GIB} GiB each"

    def launch(self, ports: Sequence[int]) -> Launch:
        """See `Server.launch`."""
        port, grpc_port, admin_port = ports
        options = {
            "--model": str(self.model),
            "--served-model-name": MODEL_NAME,
            "--port": str(port),
            "--grpc-port": str(grpc_port),
            "--admin-port": str(admin_port),
            "--handoff": self.handoff,
            "--device": "cpu",  # as the peers
            "--kv-memory": f"{KV_GIB}GiB",
            "--max-model-len": str(MAX_MODEL_LEN),
        }
        arguments = [text for option in options.items() for text in option]
        address = Address("127.0.0.1", port)
        # -P: a folder called `services` in the working directory is not Baton's.
        command = (sys.executable, "-P", "-m", "services.cli", "up", *arguments)
        metrics = Address("127.0.0.1", admin_port)
        return Launch((Process(self.name, command),), address, ((address, "/ready"),), metrics)
