"""Chooses fused kernels where they can run, and torch's operations elsewhere.

This module does not import numba before it knows that numba is installed.
"""

from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.kernels.base import BlockSizes, CodedKv, HostOperations, LatentPaged, Paged, PagedTiles, Scoring
from services.engine.kernels.cpu.availability import why_no_kernels
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.torch_operations import TorchOperations


def why_not_fused(dtype: str) -> str | None:
    """Returns the reason why fused kernels cannot run here, for a person to read; None: they can."""
    if (reason := why_no_kernels(dtype)) is not None:
        return reason
    if loaded_openmp() is None:
        return "GNU's OpenMP, or one that can stand in for it, is not loaded"
    return None


def make_operations(dtype: str, *, fused: bool, blocks: BlockSizes | None = None) -> HostOperations:
    """Makes the small operations of a decoder layer. blocks: see `Ranks.blocks`."""
    if not fused:
        return TorchOperations()
    from services.engine.kernels.cpu.operations import FusedOperations

    return FusedOperations(dtype, blocks)


def make_paged(
    pool: Tensor, layout: KvLayout, group: int, scoring: Scoring, coded: CodedKv | None = None, *, fused: bool
) -> Paged | None:
    """Makes kernels over a pool of KV blocks; None: there are none, and TorchAttention does their work.

    coded: of a pool of codes of one byte.
    """
    if not fused:
        return None
    from services.engine.kernels.cpu.operations import PagedKernels

    return PagedKernels(pool, layout, group, scoring, coded)


def make_tiles(
    pool: Tensor, layout: KvLayout, group: int, scoring: Scoring, coded: CodedKv | None = None, *, fused: bool
) -> PagedTiles | None:
    """Makes a kernel for many query tokens; None: there is none, and torch does its work. coded: see `make_paged`."""
    if not fused:
        return None
    from services.engine.kernels.cpu.operations import PagedTileKernels

    return PagedTileKernels(pool, layout, group, scoring, coded)


def make_latent(
    pool: Tensor, layout: KvLayout, num_heads: int, rope_dim: int, scale: float, *, fused: bool
) -> LatentPaged | None:
    """Makes kernels over a pool of latents; None: there are none, and torch does their work.

    Kernels that multiply pairs of bfloat16 need latents of an even number.
    """
    if not fused or (layout.dtype == "bfloat16" and (layout.head_dim - rope_dim) % 2):
        return None
    from services.engine.kernels.cpu.operations import LatentKernels

    return LatentKernels(pool, layout, num_heads, rope_dim, scale)
