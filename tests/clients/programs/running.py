"""How a program runs: it gets a gateway's URL, and ends with an error where a client does not do what it should."""

import sys
from collections.abc import Callable


def run(*parts: Callable[[str], None]) -> None:
    """Runs the parts of a program, each by its name, against the gateway that the command line names."""
    for part in parts:
        print(part.__name__, flush=True)
        part(sys.argv[1])
