"""Attention of a decode step over KV as the model computes, in int8 and in e4m3, in turns in one process."""

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(rows: int, tokens: int, layers: int, kv_heads: int, head_dim: int, group: int, rounds: int) -> list[Record]:
    """Returns a record for each kind of KV: its bytes, and the median time of all layers in each round."""
    load_openmp()  # before torch is imported
    from loadtest.micro import kv_kinds

    return kv_kinds.measure(kv_kinds.Shape(rows, tokens, layers, kv_heads, head_dim, group), rounds)
