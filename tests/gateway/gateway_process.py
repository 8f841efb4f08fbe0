"""A gateway process over the tokenizer of a small model, and clients' ways to wait for it."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from tests.gateway import tokenizer_files

GATEWAY = """
import json, sys
from pathlib import Path
from services.config import HandoffMode
from services.process.configs import GatewayConfig, ProcessSettings, ServingSettings
from services.gateway.main import run
model, ports, options, *workers = sys.argv[1:]
options = json.loads(options)
process = ProcessSettings(**options.pop("process", {}))
serving = ServingSettings(served_model_name="small", handoff=HandoffMode.ALWAYS, **json.loads(ports), **options)
sys.exit(run(GatewayConfig(model=Path(model), serving=serving, process=process, worker_addresses=tuple(workers))))
"""

CLOSED = httpx2.Limits(max_keepalive_connections=0)  # a gateway that ends waits for idle connections, for seconds


def write_model(directory: Path) -> Path:
    """Writes the files that a gateway reads of a model."""
    tokenizer = tokenizer_files.byte_level()
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return tokenizer_files.write(directory, tokenizer)


@asynccontextmanager
async def gateway(
    model: Path, port: int, admin_port: int, *workers: str, stderr: int = PIPE, grpc_port: int = 0, **options: object
) -> AsyncIterator[Process]:
    """Runs a gateway. options: of ServingSettings; `process`: those of ProcessSettings."""
    ports = {"port": port, "grpc_port": grpc_port, "admin_port": admin_port}
    arguments = [sys.executable, "-c", GATEWAY, str(model), json.dumps(ports), json.dumps(options), *workers]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=stderr)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(client: httpx2.AsyncClient) -> None:
    """Returns when the gateway takes requests."""
    async with asyncio.timeout(120):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.05)


async def how_it_ended(process: Process) -> tuple[int | None, str, str]:
    """The exit code and the output of a gateway that ends."""
    async with asyncio.timeout(120):
        out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()
