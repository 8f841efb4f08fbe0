"""What this machine's processor has, as the kernel says it, and skips for what it lacks.

A test that needs a feature is marked `@needs("AMX")`, or calls `require("AMX")` in a fixture. Whether such a skip is
right is not the test's word: the guard of skips (tests/skip_guard.py) asks the processor itself.
"""

from pathlib import Path

import pytest

FEATURES = {  # by name: the flags of /proc/cpuinfo that it stands for
    "AMX": ("amx_tile", "amx_bf16", "avx512f", "avx512dq", "avx512_bf16"),
}

_REASON = "the processor lacks "
_hidden: set[str] = set()  # features that a switch of this run hides


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first core's flags."""
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def lacks(feature: str, has: frozenset[str]) -> bool:
    """True where a processor with these flags does not have a feature."""
    return not has.issuperset(FEATURES[feature])


def hide(feature: str) -> None:
    """From now on this process takes the processor for one without the feature."""
    _hidden.add(feature)


def require(feature: str) -> None:
    """Skips the test where the processor lacks a feature."""
    if feature in _hidden or lacks(feature, flags()):
        pytest.skip(_REASON + feature)


def needs(feature: str) -> pytest.MarkDecorator:
    """A mark for tests that need a feature."""
    return pytest.mark.needs(feature)


def feature_that_was_missed(reason: str) -> str | None:
    """The feature that a skip gives as its reason; None where it is none that is known."""
    _, said, feature = reason.rpartition(_REASON)
    return feature if said and feature in FEATURES else None
