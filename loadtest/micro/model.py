"""The time that a step spends in each part of the model, beside what memory and cores of the machine allow."""

from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(model: Path | None, context: int, float32: int) -> list[Record]:
    """Returns records for each step: its parts, then the whole of it."""
    if model is None:
        raise SystemExit("name a checkpoint with --model")
    load_openmp()  # before torch is imported
    import torch

    from loadtest.micro import model_parts

    return model_parts.measure(model, context, torch.float32 if float32 else torch.bfloat16)
