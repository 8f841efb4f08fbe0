"""Every kernel against its reference, over random shapes. A family of kernels at a time, for as long as it is given."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import count

import torch

from loadtest.tables import Record
from tests.gpu.checks.result import Check

FAMILIES = {"attention": 2, "rows": 4, "rotary": 4, "fp8_linear": 4, "sampling": 4}  # random cases of each round


def measure(family: str, device: torch.device, seed: int, seconds: float) -> Iterator[Record | str]:
    """Rounds until so much time has passed: one row for all of them, and a note for each case beyond its bound.

    In the interpreter, what kernels do to memory that is not theirs is a failed case too.
    """
    check = import_module(f"tests.gpu.checks.{family}").check
    deadline, found = time.monotonic() + seconds, list[Check]()
    with _watched(device) as strays:
        for number in count():
            found += check(device, seed + number, FAMILIES[family])
            if time.monotonic() > deadline:
                break
    found += [Check(stray, error=1.0, bound=0.0) for stray in strays]
    yield summary(family, seed, found)
    yield from (f"beyond its bound: {each.name}: {each.error:.3g} > {each.bound:.3g}" for each in found if not each.ok)


def summary(family: str, seed: int, found: list[Check]) -> Record:
    """How many cases, how many beyond their bound, and the one that came nearest to it or is farthest beyond."""
    worst = max(found, key=_share)
    return {
        "kernels": family,
        "from_seed": seed,
        "cases": len(found),
        "failed": sum(not each.ok for each in found),
        "worst": worst.name,
        "error": worst.error,
        "bound": worst.bound,
    }


def _watched(device: torch.device) -> AbstractContextManager[list[str]]:
    if device.type == "cuda":
        return nullcontext([])
    from tests.gpu.checks.memory import watched_memory

    return watched_memory()


def _share(check: Check) -> float:
    """Of its bound; something that is exact has nothing of it, something that should be and is not has all there is."""
    if check.ok:
        return check.error / check.bound if check.bound else 0.0
    return float("inf")
