"""The processor of this machine, without whose name figures say nothing."""

import platform
from pathlib import Path

_WIDE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # instructions that make a difference


def processor() -> str:
    """The name of the processor, with its widest instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wide = [flag for flag in _WIDE if flag in values.get("flags", "").split()]
    return f"{values.get('model name', platform.machine())} ({', '.join(wide)})"
