"""Sums over two ranks by kernels and by Gloo, in turns: microseconds by rows and width, one thread on each rank."""

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(rounds: int) -> list[Record]:
    """Returns a record for each size."""
    load_openmp()  # before torch is imported
    from loadtest.micro import rank_sum_turns

    return rank_sum_turns.measure(rounds)
