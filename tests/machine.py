"""What this machine has, and skips of tests for what it lacks.

A test that needs something is marked `@needs(AMX)`, or calls `require(AMX)` in a fixture. Whether such a skip is right
is not the test's word: the guard of skips (tests/skip_guard.py) looks at the machine itself.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

AMX, NO_AMX, BFLOAT16, GCC = "AMX", "no AMX", "AVX-512 with bfloat16", "gcc"
TWO_CORES, GPU, NO_GPU = "two cores", "a CUDA device", "no CUDA device"
REDIS = "redis-server"  # a distribution's, which knows TLS
FAKETIME = "libfaketime"
CHROMIUM = "chromium and its driver"
PROMTOOL = "promtool"
NAMESPACES = "permission to make namespaces"  # of networks and mounts

_REASON = "this machine lacks: "
_BFLOAT16_FLAGS = ("avx512f", "avx512dq", "avx512_bf16")  # of /proc/cpuinfo
_AMX_FLAGS = ("amx_tile", "amx_bf16", *_BFLOAT16_FLAGS)
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
_hidden: set[str] = set()  # features that a switch of this run hides
# By feature that can be hidden: the most that oneDNN, and our kernels (`isa.may_use_amx`), may then use.
ISA_WITHOUT = {AMX: "AVX512_CORE_BF16"}


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first core's flags, as the kernel says them."""
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _has_amx() -> bool:
    """The processor has it, and the kernel gives it to processes."""
    if not flags().issuperset(_AMX_FLAGS):
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return refused == 0


def _has_gpu() -> bool:
    import torch  # takes seconds, which only a run with such a skip should pay

    return bool(torch.cuda.is_available())


def _permits(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


FEATURES: dict[str, Callable[[], bool]] = {
    AMX: _has_amx,
    NO_AMX: lambda: not _has_amx(),
    BFLOAT16: lambda: flags().issuperset(_BFLOAT16_FLAGS),
    REDIS: lambda: shutil.which(REDIS) is not None,
    FAKETIME: lambda: faketime_library() is not None,
    CHROMIUM: lambda: all(map(shutil.which, ("chromium", "chromedriver"))),
    PROMTOOL: lambda: shutil.which(PROMTOOL) is not None,
    NAMESPACES: lambda: _permits("unshare", "--net", "--mount", "true"),
    GCC: lambda: shutil.which(GCC) is not None,
    TWO_CORES: lambda: len(os.sched_getaffinity(0)) >= 2,
    GPU: _has_gpu,
    NO_GPU: lambda: not _has_gpu(),
}


def faketime_library() -> Path | None:
    """The library that gives a process another wall clock, as distributions install it; None: it is not there."""
    return next(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"), None)


def has(feature: str) -> bool:
    """Looks at the machine."""
    return FEATURES[feature]()


def hide(feature: str) -> None:
    """From now on this process takes the machine for one without the feature."""
    _hidden.add(feature)


def is_hidden(feature: str) -> bool:
    """Whether `hide` was called for it."""
    return feature in _hidden


def require(feature: str) -> None:
    """Skips the test where the machine lacks a feature."""
    if is_hidden(feature) or not has(feature):
        pytest.skip(_REASON + feature)


def miss(what: str) -> NoReturn:
    """Skips the test for a program that is not installed, or fails it in continuous integration, which must run all.

    what: says what is missing.
    """
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def needs(feature: str) -> pytest.MarkDecorator:
    """A mark for tests that need a feature."""
    return pytest.mark.needs(feature)


def feature_that_was_missed(reason: str) -> str | None:
    """The feature that a skip gives as its reason; None where it is none that is known."""
    _, said, feature = reason.rpartition(_REASON)
    return feature if said and feature in FEATURES else None
