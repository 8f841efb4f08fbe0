"""The rotary embedding's parameters, read from config.json.

They come from transformers 5's `rope_parameters`, or from the older `rope_theta` and `rope_scaling`. An unknown
parameter is refused by name: it would change the positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.settings import read_bool, read_float, read_int
from services.protocol.model_files.base import ModelError, Settings


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Scaling that divides all positions by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of frequencies by wavelength, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scaling of frequencies by how often they turn within the original context (Peng et al. 2023, arXiv
    2309.00071).
    """

    factor: float
    attention_factor: float  # factor on cosine and sine
    beta_fast: float  # frequencies with so many turns or more are kept
    beta_slow: float  # frequencies with so many turns or fewer are divided by `factor`
    truncate: bool  # the ramp between both begins and ends at whole dimensions
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """A divisor for each frequency, as GGUF files of Llama 3.1 and later have them."""

    factors: tuple[float, ...]  # [head_dim / 2]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of a rotary embedding."""

    theta: float
    scaling: Scaling | None = None


def parse_rope(raw: Settings, max_position_embeddings: int) -> Rope:
    """Returns the parameters that config.json's values describe. Raises ModelError."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    values = raw.get(where) or {}
    if not isinstance(values, dict):
        raise ModelError(f"config.json: {where} is {values!r}, an object was expected")
    if read_float({**raw, **values}, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor is not supported")
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(f"config.json: rope type {kind!r} is not supported (supported: {', '.join(_KINDS)})")
    known, scaling = _KINDS[kind]
    if unknown := sorted(values.keys() - _COMMON - known):
        raise ModelError(f"config.json: {where} of type {kind!r} has {unknown[0]!r}, which is not supported")
    theta = read_float(values, "rope_theta", read_float(raw, "rope_theta", 10000.0))
    context = read_int(raw, _CONTEXT, read_int(values, _CONTEXT, max_position_embeddings))
    return Rope(theta, scaling(values, context))


def _linear(values: Settings, context: int) -> LinearScaling:
    return LinearScaling(read_float(values, "factor"))


def _llama3(values: Settings, context: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=read_float(values, "factor"),
        low_freq_factor=read_float(values, "low_freq_factor"),
        high_freq_factor=read_float(values, "high_freq_factor"),
        original_max_position_embeddings=context,
    )


def _yarn(values: Settings, context: int) -> YarnScaling:
    scaling = YarnScaling(
        factor=read_float(values, "factor"),
        attention_factor=read_float(values, "attention_factor", _attention_factor(values)),
        beta_fast=read_float(values, "beta_fast", 32.0),
        beta_slow=read_float(values, "beta_slow", 1.0),
        truncate=read_bool(values, "truncate", True),
        original_max_position_embeddings=context,
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise ModelError("config.json: beta_fast of the yarn rope is less than beta_slow")
    return scaling


def _frequency_factors(values: Settings, context: int) -> FrequencyFactors:
    factors = values.get("factors")
    if not isinstance(factors, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise ModelError("config.json: factors of the rope is no list of positive numbers")
    return FrequencyFactors(tuple(map(float, factors)))


def _attention_factor(values: Settings) -> float:
    """Returns the factor that the paper recommends (section 3.3), or the quotient of two such factors, as
    in DeepSeek.
    """

    def magnitude(weight: float) -> float:
        return max(1.0, 0.1 * weight * math.log(read_float(values, "factor")) + 1.0)

    if "mscale" in values and "mscale_all_dim" in values:
        return magnitude(read_float(values, "mscale")) / magnitude(read_float(values, "mscale_all_dim"))
    return magnitude(1.0)


_CONTEXT = "original_max_position_embeddings"
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _CONTEXT}

# For each type: the names of its parameters, and the function that reads them.
_KINDS: dict[str, tuple[set[str], Callable[[Settings, int], Scaling | None]]] = {
    "default": (set(), lambda values, context: None),
    "linear": ({"factor"}, _linear),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _CONTEXT}, _llama3),
    "yarn": (_YARN, _yarn),
    "frequency_factors": ({"factors"}, _frequency_factors),
}
