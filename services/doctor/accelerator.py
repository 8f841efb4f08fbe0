"""torch, CUDA and the driver, looked at in another process: torch takes seconds and much memory."""

import asyncio
import json
import sys
from typing import Any

from services.doctor.finding import CannotCheck, Finding, note, ok, warning

LIMIT_S = 40.0

_PROGRAM = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        gpus.append([found.name, found.total_memory, f"{found.major}.{found.minor}"])
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_DRIVER = "/proc/driver/nvidia/version"


async def check_accelerators() -> list[Finding]:
    """Asks torch. Raises CannotCheck where torch cannot be loaded."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        told, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = complaints.decode(errors="replace").strip().rpartition("\n")[2]
        raise CannotCheck(f"torch cannot be loaded, so no worker can run here: {last}")
    return describe(json.loads(told.decode().splitlines()[-1]), driver_version())


def driver_version() -> str | None:
    """Returns the first line of what NVIDIA's driver says of itself; None: it is not loaded."""
    try:
        with open(_DRIVER) as file:
            return file.readline().strip()
    except OSError:
        return None


def describe(told: dict[str, Any], driver: str | None) -> list[Finding]:
    """Puts into words what torch told.

    told: `torch`, its version; `cuda`, that of CUDA, None where torch is built without; `gpus`, of each one name, bytes
    and capability.
    """
    findings = [ok("torch", told["torch"])]
    if told["gpus"]:
        names = ", ".join(f"{name} ({size / (1 << 30):.0f} GiB, {made})" for name, size, made in told["gpus"])
        findings.append(ok("gpus", f"{names}; CUDA {told['cuda']}; {driver or 'driver unknown'}"))
    elif driver is not None:
        why = "torch was built without CUDA" if told["cuda"] is None else "torch sees no GPU"
        findings.append(warning("gpus", f"{why}, and there is a driver: {driver}", "install torch for CUDA"))
    else:
        findings.append(note("gpus", "there is no NVIDIA driver: models run on the CPU"))
    return findings
