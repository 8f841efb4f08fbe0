"""The processor: its class, which decides about kernels, and the cores that this process may use."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from services.doctor.finding import Finding, error, note, ok, warning
from services.engine.kernels.cpu import isa

CGROUP = Path("/sys/fs/cgroup")


def check_processor() -> list[Finding]:
    """Looks at the class of the processor and at the cores."""
    return [check_class(os.environ), check_cores(len(os.sched_getaffinity(0)), cpu_quota(CGROUP))]


def check_class(environ: Mapping[str, str]) -> Finding:
    """Tells which kernels a worker on this CPU would have."""
    if importlib.util.find_spec("numba") is None:
        return warning("kernels", "numba is not installed: torch computes, slower", "install numba")
    try:
        found = isa.choose(environ, isa.host_features(), isa.host_processor())
    except isa.IsaError as reason:
        return error("kernels", str(reason), "no worker starts with that: change or unset the variable")
    if found is None:
        return warning("kernels", "there are none for this processor: torch computes, slower", "AVX2 is the least")
    return ok("kernels", f"of class {found.name}, for {isa.host_processor()}")


def cpu_quota(cgroup: Path) -> float | None:
    """Returns the cores' worth of time that this control group (version 2) may use; None: no limit is known."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):  # the root group has no such file
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_cores(cores: int, quota: float | None) -> Finding:
    """Compares the cores, for each of which a worker has a thread, with the time that they may have."""
    if quota is not None and quota < cores:
        threads = max(int(quota), 1)
        return warning(
            "cores",
            f"{cores} cores, and time for {quota:g} of them: threads wait for each other when the time is used up",
            f"--num-threads {threads} for each worker, or a CPU set of whole cores",
        )
    return note("cores", "1 core: prefill and decode share it") if cores == 1 else ok("cores", f"{cores} cores")
