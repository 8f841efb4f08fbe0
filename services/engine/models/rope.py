"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated against each other.

Angles are float32, their cosine and sine are cast to the model's dtype, as `transformers` does it.
"""

import math

import torch
from torch import Tensor

from services.engine.models.config import Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32[head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def rotation(inverse: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for `apply_rotation`, [T, 1, head_dim], of the tokens at `positions` (int[T])."""
    angles = positions.to(torch.float32)[:, None, None] * inverse
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotation(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates [T, heads, head_dim]: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, and those between interpolated (Llama 3.1)."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < context / high, frequencies, slowed)
