"""`python -m loadtest.micro PART`: prints what one part of Baton costs.

index   the prefix index in Redis: lookups, publishing, memory
"""

import argparse
import asyncio
import sys

from loadtest.micro import index

PARTS = {"index": index.measure}


def main() -> None:
    """Prints one line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.micro", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--blocks", type=int, default=1_000_000, help="(block, worker) pairs (%(default)s)")
    options = parser.parse_args()
    for name, value in asyncio.run(PARTS[options.part](options.blocks)):
        sys.stdout.write(f"{name:58} {value}\n")


main()
