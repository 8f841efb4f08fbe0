"""Asks a process of its own whether this machine has room for more workers: the launcher knows no models."""

import asyncio
import sys
from collections.abc import Mapping

from services.config.engine import RoomConfig
from services.launcher.control import CommandFailed
from services.process import child_config

_LIMIT_S = 120.0  # torch takes seconds, on a busy machine many
_COMMAND = (sys.executable, "-P", "-m", "services.engine.runner.room")


async def check(config: RoomConfig, environment: Mapping[str, str]) -> None:
    """Raises CommandFailed where there is no room, or where that cannot be found out."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**environment, **child_config.environment(config)},
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise CommandFailed(f"whether there is room for more workers was not found out in {_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = said.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        raise CommandFailed(f"there is no room for more workers: {last.removeprefix('baton: ')}")
