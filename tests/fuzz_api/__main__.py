"""Generated requests to a gateway, by hypothesis: none is answered by a 5xx, none hangs, and all is well afterwards.

The gateway is one in this process over a scripted generator, or with `--workers` one of a whole stack of processes on a
tiny model.

    python -m tests.fuzz_api --requests 100000 --seed 1
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz_api.target import Target, fuzz
from tests.gateway.api_thread import api_in_thread


@contextlib.contextmanager
def _alone() -> Iterator[Target]:
    with api_in_thread() as (port, grpc_port):
        yield Target(port, grpc_port, "m")


@contextlib.contextmanager
def _with_workers() -> Iterator[Target]:
    from tests.e2e.conftest import write_model
    from tests.e2e.stack import running_stack

    short = ["--max-model-len", "64"]  # or 128 choices that fill the context take their time
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), "llama")
        with running_stack(model, options=short) as stack:
            yield Target(stack.gateway.port, stack.gateway.grpc_port, "tiny")
            stack.gateway.wait_for_baseline()
            assert stack.gateway.num_connected() == 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", action="store_true", help="a stack of processes on a tiny model")
    arguments = parser.parse_args()
    started = time.monotonic()
    with _with_workers() if arguments.workers else _alone() as target, contextlib.closing(target):
        fuzz(target, arguments.requests, arguments.seed)
    seconds = time.monotonic() - started
    print(f"{target.num_sent} requests in {seconds:.0f} s; answers: {dict(sorted(target.answers.items()))}")
    return 0


sys.exit(main())
