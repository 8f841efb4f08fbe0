"""The machine, the versions and the command of a run, without which its figures say nothing."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtest.compare import llama_cpp
from loadtest.processor import processor

Facts = Mapping[str, str]

_OURS = ("baton-serve", "torch", "nixl", "numpy", "numba")
_THEIRS = ("vllm", "torch", "nixl", "intel-openmp")
_VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def facts(command: Sequence[str], venv: Path | None, llama_server: Path | None, cores: list[int]) -> Facts:
    """Collects the head of a report. venv: vLLM's. Raises OSError and CalledProcessError where a peer does not run."""
    found = {
        "command": f"`{' '.join(command)}`",
        "machine": f"{processor()}, cores {cores}, {_memory_gib():.0f} GiB, {platform.platform()}",
        "Baton": _words({"Python": platform.python_version(), "commit": _commit(), **_our_versions()}),
    }
    if venv is not None:
        found["vLLM"] = _words(_versions(venv))
    if llama_server is not None:
        found["llama.cpp"] = llama_cpp.version(llama_server)
    return found


def _versions(venv: Path) -> dict[str, str]:
    asked = subprocess.run(
        [venv / "bin" / "python", "-c", _VERSIONS, *_THEIRS], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(asked.stdout)
    return found


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _our_versions() -> dict[str, str]:
    found = {}
    for name in _OURS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # one that Baton can do without
    return found


def _commit() -> str:
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
