"""Kernels of every class of processors at every shape: head sizes, query heads of a KV head, numbers of tokens, depths.

    python -m tests.engine.kernels.shapes --share 0.1 --seed 5 --class amx --kernel tiles --processes 2

A share of the kernels is chosen at random; without options all are run, which takes hours. A class that this processor
is runs on it, any other over `emulation`. `--one` runs what the tests ran with a seed that they print.
"""

import argparse
import os
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

from services.engine.kernels.cpu.isa import ISAS
from tests.engine.kernels.class_process import run_as, run_emulated, runnable

HEAD_DIMS, GROUPS = range(32, 257, 8), range(1, 9)
_BLOCK_SIZES = (16, 8, 32, 64)  # one after the other
_DTYPES = ("bfloat16", "float32")
_CODED = ("int8", "e4m3", "e4m3, static scales")  # one after the other
_OF_HEADS = ("tiles", "singles")
KERNELS = (*_OF_HEADS, "products", "codes", "int8", "small")
_AT_ONCE = 8  # kernels that a process compiles


@dataclass(frozen=True)
class Shape:
    """Kernels of one class and dtype; those of attention are compiled for one shape of heads."""

    isa: str
    kernel: str  # one of KERNELS
    dtype: str
    head_dim: int = 0
    group: int = 0
    block_size: int = 0
    form: str = "plain"  # of the KV pool, a value of `KvForm`


def all_shapes(isas: Iterable[str], kernels: Iterable[str] = KERNELS) -> list[Shape]:
    """Every shape of these kernels in these classes."""
    return [
        shape for isa in isas for dtype in _DTYPES for kernel in kernels for shape in _shapes_of(isa, kernel, dtype)
    ]


def _shapes_of(isa: str, kernel: str, dtype: str) -> Iterator[Shape]:
    if kernel not in _OF_HEADS:
        yield Shape(isa, kernel, dtype)
        return
    for head_dim in HEAD_DIMS:
        for group in GROUPS:
            number = head_dim // 8 + group
            heads = isa, kernel, dtype, head_dim, group, _BLOCK_SIZES[number % len(_BLOCK_SIZES)]
            yield Shape(*heads)
            yield Shape(*heads, _CODED[number % len(_CODED)])


def run(shapes: list[Shape], steps: int | None, seed: int) -> list[str]:
    """Runs shapes of one class in a process of it, each with at most so many steps. Says what failed."""
    (isa,) = {shape.isa for shape in shapes}
    run_it = run_as if isa in [one.name for one in runnable()] else run_emulated
    try:
        found: list[str] = run_it(isa, "tests.engine.kernels.shapes:failures", shapes, steps, seed)
    except AssertionError as error:  # the process ended by itself
        found = [f"one of {shapes}: {error}"]
    return [f"{isa}: {failure}" for failure in found]


def run_seed(seed: int, steps: int | None) -> list[str]:
    """Runs one shape that follows from the seed, of any class and kernel."""
    chance = random.Random(seed)
    shape = chance.choice(all_shapes([chance.choice(ISAS).name], [chance.choice(KERNELS)]))
    return run([shape], steps, seed)


def failures(shapes: list[Shape], steps: int | None, seed: int) -> list[str]:
    """What `run` does, in a process of the class."""
    import torch

    from tests.engine.kernels import attention_shapes, coded_shapes, product_shapes

    of_kernels = {
        "products": product_shapes.product_failures,
        "codes": coded_shapes.coded_failures,
        "int8": product_shapes.int8_failures,
        "small": product_shapes.small_failures,
    }

    torch.set_num_threads(1)
    found: list[str] = []
    for shape in shapes:
        if shape.kernel in _OF_HEADS:
            softcap, has_sinks = random.Random(f"{shape} {seed}").choice(((None, False), (0.7, True)))
            of_heads = shape.dtype, shape.head_dim, shape.group, shape.block_size
            heads = attention_shapes.Heads(*of_heads, softcap, has_sinks, shape.form)
            found += attention_shapes.failures(shape.kernel, heads, steps, seed)
        else:
            found += of_kernels[shape.kernel](getattr(torch, shape.dtype), steps, seed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels at every shape, against float64.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--share", type=float, default=1.0, help="of the shapes")
    parser.add_argument("--steps", type=int, help="most of each shape: numbers of tokens, rows, widths")
    parser.add_argument("--class", dest="isa", choices=[isa.name for isa in ISAS], action="append")
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", type=int, metavar="SEED", help="run the shape of this seed alone")
    options = parser.parse_args()
    if options.one is not None:
        return _say(run_seed(options.one, options.steps))
    chance = random.Random(options.seed)
    isas, kernels = options.isa or [isa.name for isa in ISAS], options.kernel or KERNELS
    parts = [part for isa in isas for part in _parts(isa, kernels, options.share, chance)]
    print(f"seed {options.seed}: {sum(map(len, parts))} kernels", flush=True)
    with ThreadPoolExecutor(options.processes) as pool:
        return _say(chain.from_iterable(pool.map(partial(run, steps=options.steps, seed=options.seed), parts)))


def _say(failed: Iterable[str]) -> int:
    """Prints failures as they come. Returns the process's exit code."""
    count = 0
    for failure in failed:
        print(failure, flush=True)
        count += 1
    print(f"{count} failed")
    return 1 if count else 0


def _parts(isa: str, kernels: Iterable[str], share: float, chance: random.Random) -> Iterator[list[Shape]]:
    """Shapes of a class, as many as a process should compile."""
    chosen = [shape for shape in all_shapes([isa], kernels) if chance.random() < share]
    for begin in range(0, len(chosen), _AT_ONCE):
        yield chosen[begin : begin + _AT_ONCE]


if __name__ == "__main__":
    sys.exit(main())
