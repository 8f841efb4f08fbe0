"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated against each other.

Angles are float32; their cosine and sine are cast to the model's dtype, as in `transformers`.
"""

import math

import torch
from torch import Tensor

from services.engine.models.rope_config import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Returns the angle per position of each pair of dimensions, float32[rotary_dim / 2]. rotary_dim: the numbers of a
    head that are rotated.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    periods = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / periods
        case LinearScaling(factor):
            return 1.0 / periods / factor
        case Llama3Scaling():
            return _llama3(1.0 / periods, rope.scaling)
        case YarnScaling():
            return _yarn(periods, rope.theta, rope.scaling)
        case FrequencyFactors(factors):
            return 1.0 / periods / torch.tensor(factors, dtype=torch.float32)
        case LongRopeScaling():
            return 1.0 / (torch.tensor(rope.scaling.factors, dtype=torch.float32) * periods)
        case DynamicScaling():
            return 1.0 / _grown(rope.theta, rope.scaling, rotary_dim) ** exponents


def magnitude(rope: Rope) -> float:
    """Returns the factor on cosine and sine."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0


def rotation(inverse: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns cosine and signed sine for `Operations.rotate`, [T, 1, rotary_dim], of the tokens at
    `positions` (int[T]).
    """
    angles = positions.to(torch.float32)[:, None, None] * inverse
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _grown(theta: float, scaling: DynamicScaling, rotary_dim: int) -> float:
    """Returns the base with which the slowest wave turns, at the longest sequence's end, as far as at the original
    context's end when it is interpolated ("NTK-aware" scaling).
    """
    context, factor = scaling.original_max_position_embeddings, scaling.factor
    growth = factor * scaling.longest / context - (factor - 1)
    return float(theta * growth ** (rotary_dim / (rotary_dim - 2)))


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slows long waves by `factor`, keeps short ones, and interpolates those between (Llama 3.1)."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < context / high, frequencies, slowed)


def _yarn(periods: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Keeps dimensions that turn often within the original context, interpolates slow ones, with a ramp between.

    "NTK-by-parts" of YaRN, section 3.2, with the ramp over dimensions as in its authors' code.
    """
    head_dim = 2 * len(periods)

    def dimension(turns: float) -> float:
        """Returns the dimension whose wave turns so often within the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(len(periods), dtype=torch.float32)
    kept = 1 - ((steps - first) / ((last - first) or 0.001)).clamp(0, 1)
    return (1 / (scaling.factor * periods)) * (1 - kept) + (1 / periods) * kept
