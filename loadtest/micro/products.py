"""Products of linear layers in int8, in turns with the same in bfloat16 (or float32), beside the peaks of the cores."""

from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(model: Path | None, threads: int, rounds: int, float32: int) -> list[Record]:
    """Returns the peak rates, a record for each product, then one for each step of the model, if one is named."""
    load_openmp()  # before torch is imported
    import torch

    from loadtest.micro import product_turns

    return product_turns.measure(model, threads, rounds, torch.float32 if float32 else torch.bfloat16)
