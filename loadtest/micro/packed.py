"""Steps over weights in codes beside the same weights in numbers, and from how many rows on panels are unpacked."""

from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(model: Path | None, context: int, float32: int) -> list[Record]:
    """Returns records of products of some rows, then of steps."""
    if model is None:
        from services.launcher import demo_model

        found = demo_model.find()
        if found.is_random:
            raise SystemExit(f"name a checkpoint in codes with --model, or install the demo model: {found.note}")
        model = found.path
    load_openmp()  # before torch is imported
    import torch

    from loadtest.micro import packed_parts

    return packed_parts.measure(model, context, torch.float32 if float32 else torch.bfloat16)
