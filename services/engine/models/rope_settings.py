"""The rotary embedding's parameters, read from config.json.

They come from transformers 5's `rope_parameters`, or from the older `rope_theta` and `rope_scaling`. A parameter that
means nothing for the type is refused by name, as every setting that nobody reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError


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


def parse_rope(raw: ConfigSettings, max_position_embeddings: int, default_theta: float = 10000.0) -> Rope:
    """Returns the parameters that config.json's settings describe. Raises ModelError."""
    sections = [raw.section(name) for name in ("rope_scaling", "rope_parameters")]
    ropes = [_parse(raw, section, max_position_embeddings, default_theta) for section in sections if section]
    if len(set(ropes)) > 1:  # libraries differ in which they take
        raise ModelError("config.json: rope_scaling and rope_parameters differ: remove one of them")
    return ropes[0] if ropes else _parse(raw, sections[0], max_position_embeddings, default_theta)


def parse_ropes_of_types(
    raw: ConfigSettings, max_position_embeddings: int, default_theta: float, default_local_theta: float
) -> tuple[Rope, Rope]:
    """Returns the ropes of Gemma 3's layers without a window and with one. Raises ModelError.

    They are `full_attention` and `sliding_attention` of `rope_parameters`, or the older `rope_theta` with
    `rope_scaling`, and `rope_local_base_freq`.
    """
    types, local_theta = raw.section("rope_parameters"), raw.number("rope_local_base_freq", default_local_theta)
    full, local = types.section("full_attention"), types.section("sliding_attention")
    older = raw.section("rope_scaling")
    ropes = [_parse(raw, each, max_position_embeddings, default_theta) for each in (full, older) if each]
    if len(set(ropes)) > 1:
        raise ModelError("config.json: rope_scaling and rope_parameters differ: remove one of them")
    whole = ropes[0] if ropes else _parse(raw, full, max_position_embeddings, default_theta)
    return whole, _parse(raw, local, max_position_embeddings, default_theta, local_theta)


def _parse(
    raw: ConfigSettings,
    section: ConfigSettings,
    max_position_embeddings: int,
    default_theta: float,
    theta: float | None = None,
) -> Rope:
    """Returns the parameters of one of the two objects; what it does not have may lie beside it. theta: a base that
    stands above what lies beside it.
    """
    for settings in (raw, section):
        if settings.number("partial_rotary_factor", 1.0) != 1.0:
            raise settings.refusal("partial_rotary_factor", "is not supported (only 1.0)")
    older = section.text("type")
    kind = section.text("rope_type", older or "default")
    if kind not in _KINDS:
        key = "type" if kind == older else "rope_type"
        raise section.refusal(key, f"is not supported (supported: {', '.join(_KINDS)})")
    theta = section.number("rope_theta", raw.number("rope_theta", default_theta) if theta is None else theta)
    context = raw.integer(_CONTEXT, max_position_embeddings)
    if raw.value(_CONTEXT) is not None and section.value(_CONTEXT, context) != context:
        raise raw.refusal(_CONTEXT, "differs from that of the rope")  # libraries differ in which they take
    return Rope(theta, _KINDS[kind](section, context))


def _none(section: ConfigSettings, context: int) -> None:
    return None


def _linear(section: ConfigSettings, context: int) -> LinearScaling:
    return LinearScaling(section.number("factor"))


def _llama3(section: ConfigSettings, context: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=section.integer(_CONTEXT, context),
    )


def _yarn(section: ConfigSettings, context: int) -> YarnScaling:
    scaling = YarnScaling(
        factor=section.number("factor"),
        attention_factor=section.number("attention_factor", _attention_factor(section)),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        original_max_position_embeddings=section.integer(_CONTEXT, context),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise ModelError("config.json: beta_fast of the yarn rope is less than beta_slow")
    return scaling


def _frequency_factors(section: ConfigSettings, context: int) -> FrequencyFactors:
    factors = section.value("factors")
    if not isinstance(factors, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise ModelError("config.json: factors of the rope is no list of positive numbers")
    return FrequencyFactors(tuple(map(float, factors)))


def _attention_factor(section: ConfigSettings) -> float:
    """Returns the factor that the paper recommends (section 3.3), or the quotient of two such factors, as
    in DeepSeek.
    """

    def magnitude(weight: float) -> float:
        return max(1.0, 0.1 * weight * math.log(section.number("factor")) + 1.0)

    weights = section.value("mscale"), section.value("mscale_all_dim")
    if None in weights:
        return magnitude(1.0)
    return magnitude(section.number("mscale")) / magnitude(section.number("mscale_all_dim"))


_CONTEXT = "original_max_position_embeddings"

_KINDS: dict[str, Callable[[ConfigSettings, int], Scaling | None]] = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _frequency_factors,
}

# Of a config.json that says nothing of a rope.
GPT_OSS_ROPE = Rope(
    150000.0, YarnScaling(32.0, 0.1 * math.log(32.0) + 1.0, 32.0, 1.0, False, original_max_position_embeddings=4096)
)
