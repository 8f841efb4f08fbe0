"""`python -m loadtest.micro PART`: prints what one part of Baton costs.

index       the prefix index in Redis: lookups, publishing, memory
step        a decode step beside the publishing of the blocks that it fills
transport   KV blocks between two processes of this host, over NIXL and over gRPC
"""

import argparse
import asyncio
import sys

from loadtest.micro import index, step, transport


def main() -> None:
    """Prints one line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.micro", description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    of_index = parts.add_parser("index")
    of_index.add_argument("--blocks", type=int, default=1_000_000, help="(block, worker) pairs (%(default)s)")
    of_step = parts.add_parser("step")
    of_step.add_argument("--batch", type=int, default=256, help="sequences (%(default)s)")
    parts.add_parser("transport")
    options = parser.parse_args()
    match options.part:
        case "index":
            figures = asyncio.run(index.measure(options.blocks))
        case "step":
            figures = asyncio.run(step.measure(options.batch))
        case _:
            figures = transport.measure()
    for name, value in figures:
        sys.stdout.write(f"{name:58} {value}\n")


if __name__ == "__main__":  # not in a process that a part starts
    main()
