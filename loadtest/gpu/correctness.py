"""Checks of every kernel against its reference, over random shapes: one family of kernels, for a given time."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import count

import torch

from loadtest.tables import Record
from tests.gpu.checks.result import Check

# random cases of each round
FAMILIES = {
    "attention": 2,
    "rows": 4,
    "rotary": 4,
    "fp8_linear": 4,
    "coded": 4,
    "experts": 4,
    "latents": 2,
    "sampling": 4,
}


def measure(family: str, device: torch.device, seed: int, seconds: float) -> Iterator[Record | str]:
    """Checks rounds of random cases for `seconds`, and yields one record, then a note for each case beyond its bound.

    In Triton's interpreter, a kernel that touches memory beside its tensors is a failed case too.
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
    """Counts the cases and those beyond their bound, and names the case with the largest share of its bound."""
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
    """Returns the error as a share of its bound: 0 for an exact result, infinity for one beyond its bound."""
    if check.ok:
        return check.error / check.bound if check.bound else 0.0
    return float("inf")
