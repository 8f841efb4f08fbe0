"""Attention of a decode step over latents (DeepSeek-V2-Lite's numbers) beside K and V of as many heads, in one layer.

The KV bytes are counted from the plans of the step, and not by the hardware: virtual machines have no counter of memory
traffic. Beside them is what memory could have brought in the time that the attention took, by the rate at which as
many threads copy. Each round measures all kinds by turns in a process of its own, so a ratio is one of the same moment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from loadtest.cannot_run import CannotRun
from loadtest.tables import Record, spread
from services.engine.kernels.cpu.openmp import load_openmp

_HERE = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("latent_attention.py")
Measured = dict[str, dict[str, float]]


def measure(context: int, rows: int, threads: int, rounds: int, runs: int, before: Path | None = None) -> list[Record]:
    """Returns records for each dtype: of each kind of attention, then ratios. before: another tree of this repository,
    whose attention over K and V is measured by turns with this one's.
    """
    if before is not None and not (before / "services").is_dir():
        raise CannotRun(f"{before} is no tree of this repository")
    copied = _copy_rate(threads)
    records: list[Record] = [{"part": f"rate of copies, threads: {threads}", "gb_per_s": copied / 1e9}]
    for dtype in ("bfloat16", "float32"):
        found, older = list[Measured](), list[Measured]()
        for _ in range(rounds):
            found.append(_round(_HERE, rows, context, dtype, threads, runs))
            if before is not None:
                older.append(_round(before, rows, context, dtype, threads, runs))
        records += _records(dtype, found, copied)
        if older:
            ratios = [now["dense"]["s"] / then["dense"]["s"] for now, then in zip(found, older, strict=True)]
            records.append({"part": "dense, this tree / the one before", "dtype": dtype, **_ratios(ratios)})
    return records


def _copy_rate(threads: int) -> float:
    load_openmp()  # before torch is imported
    import torch

    from loadtest.micro.peaks import copy_rate

    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return copy_rate()
    finally:
        torch.set_num_threads(usual)


def _round(tree: Path, rows: int, context: int, dtype: str, threads: int, runs: int) -> Measured:
    command = [sys.executable, "-P", str(_PROGRAM), *map(str, (rows, context, dtype, threads, runs))]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False, cwd=tree)
    if ended.returncode:
        raise CannotRun(f"the program that measures {tree} ended with {ended.returncode}")
    measured: Measured = json.loads(ended.stdout)
    return measured


def _records(dtype: str, rounds: list[Measured], copied: float) -> list[Record]:
    records: list[Record] = []
    for part in rounds[0]:
        seconds = spread((each[part]["s"] for each in rounds), (50,))["p50"]
        assert isinstance(seconds, float)
        record: Record = {"part": part, "dtype": dtype, "ms": seconds * 1e3}
        if "read_bytes" in rounds[0][part]:
            record |= {
                "counted_mb": rounds[0][part]["read_bytes"] / 1e6,
                "layout_mb": rounds[0][part]["layout_bytes"] / 1e6,
                "copied_meanwhile_mb": seconds * copied / 1e6,
            }
        records.append(record)
    of_bytes = rounds[0]["dense"]["read_bytes"] / rounds[0]["latent"]["read_bytes"]
    ratios = _ratios([each["dense"]["s"] / each["latent"]["s"] for each in rounds])
    return [*records, {"part": "dense / latent", "dtype": dtype, "bytes_ratio": of_bytes, **ratios}]


def _ratios(ratios: list[float]) -> Record:
    """Names the ratios of seconds in the rounds."""
    return {f"time_ratio_{name}": value for name, value in spread(ratios, (0, 50, 100)).items()}
