"""Products with weights as GGUF's Q4_K, Q5_K and Q6_K have them, in turns with the same in simpler codes."""

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(threads: int, rounds: int, float32: int) -> list[Record]:
    """Returns a record for each kind, shape and number of rows."""
    load_openmp()  # before torch is imported
    import torch

    from loadtest.micro import kquant_turns

    return kquant_turns.measure(threads, rounds, torch.float32 if float32 else torch.bfloat16)
