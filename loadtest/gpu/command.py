"""`python -m loadtest gpu [PART ...]`: checks every kernel against references, then measures, on a CUDA GPU.

Without a GPU the checks run in Triton's interpreter, and nothing is measured. The checks are tests/gpu/checks, so this
runs in a checkout. Kernels are compiled in a part of their own, first, into Triton's cache, which later parts use.
Results are written after each part; a part that would begin after `--seconds` is left out, and a note says so.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from loadtest.gpu.driver import Driver, run_without_gpu
from loadtest.gpu.parts import PARTS
from loadtest.gpu.results import Results, software


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when every part that ran ended well, and every check that ran is within its bound."""
    given = _options(arguments)
    names = given.parts or list(PARTS)
    deadline = time.monotonic() + given.seconds
    has_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name(0) if has_gpu else "No CUDA GPU: nothing was measured, kernels were interpreted"
    results = Results(given.out, f"{where}; {software()}")
    driver = Driver(results, deadline=deadline, seed=given.seed)
    if has_gpu:
        driver.run(names, PARTS)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # for the processes that parts run in
        run_without_gpu(driver, results, names, PARTS)
    return int(driver.failed)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest gpu", description=__doc__.partition("\n")[0])
    parts = "; ".join(f"{name}: {part.about}" for name, part in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{parts}. Default: all, in this order.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="writes gpu.md and gpu.json there as well")
    parser.add_argument("--seconds", type=float, default=510.0, help="no part begins later (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases of the checks (%(default)s)")
    given = parser.parse_args(arguments)
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return given
