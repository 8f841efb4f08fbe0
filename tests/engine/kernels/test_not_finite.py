"""Queries, keys and values that are not finite: attention's result is not finite either, in every class of processors.

Only then does a step notice them. Kernels are not optimized, as they take longer to compile than to run;
`test_damaged_weights` has those of this processor as they are.
"""

import math
import random
import sys

import pytest

from services.engine.kernels.cpu.isa import ISAS
from tests.engine.kernels.class_process import run_emulated
from tests.machine import GCC, needs

# Classes whose vectors are of one size have the same kernels for float32.
CASES = [("avx2", "float32"), ("avx512", "float32"), *((isa.name, "bfloat16") for isa in ISAS)]


@needs(GCC)
@pytest.mark.long
def test_attention_over_numbers_that_are_not_finite_is_not_finite() -> None:
    """In one class, another with each run: one takes 20 s to compile. `python -m tests.engine.kernels.test_not_finite`
    tries all.
    """
    assert not _failures(*random.choice(CASES))


def _failures(isa: str, dtype: str) -> list[str]:
    found = run_emulated(isa, "tests.engine.kernels.test_not_finite:hidden", dtype)
    return [f"{isa}, {dtype}: {each}" for each in found]


def hidden(dtype: str) -> list[str]:
    """In a process of the class: which numbers in queries, keys or values left a finite result that float64 has not."""
    import torch

    from tests.engine.kernels.attention_shapes import Bench, Heads, Step

    torch.set_num_threads(1)
    found = []
    for kernel, step in (("tiles", Step(45, 3)), ("singles", Step(45, 1))):
        for value in (math.nan, math.inf, -math.inf):
            bench = Bench(kernel, Heads(dtype, 32, 2, 16), step.length)
            for name, damaged in (("q", bench.q[-1]), ("k", bench.kv[0, 7]), ("v", bench.kv[1, 7])):
                sound = damaged.clone()
                damaged[..., 3] = value
                bench.write(step.length)
                out = torch.zeros(step.count, *bench.q.shape[1:], dtype=bench.q.dtype)
                bench.attend(step, out, torch.zeros(out.shape[:2]))
                expected, _, _ = bench.expected(step, step.length)
                damaged.copy_(sound)
                # A key at minus infinity has no weight.
                assert not expected.isfinite().all() or (name == "k" and math.isinf(value))
                if (out.isfinite() & ~expected.isfinite()).any():
                    found.append(f"{value} in {name} of {kernel}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(failure for case in CASES for failure in _failures(*case)))
