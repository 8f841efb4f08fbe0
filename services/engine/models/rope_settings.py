"""The rotary embedding's parameters, read from config.json.

They come from transformers 5's `rope_parameters`, or from the older `rope_theta` and `rope_scaling`. A parameter that
means nothing for the type is refused by name, as every setting that nobody reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.rope_config import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True)
class RopeRules:
    """The differences of a family in how it reads its rope."""

    is_partial: bool = False  # heeds partial_rotary_factor
    kinds: tuple[str, ...] | None = None  # that it knows; None: all
    renamed: tuple[tuple[str, str], ...] = ()  # older names of kinds, and today's
    default_context: int | None = None  # original_max_position_embeddings of `longrope`; None: max_position_embeddings


PLAIN_ROPE = RopeRules()


def parse_rope(
    raw: ConfigSettings, max_position_embeddings: int, default_theta: float = 10000.0, rules: RopeRules = PLAIN_ROPE
) -> Rope:
    """Returns the parameters that config.json's settings describe, for sequences of all of the model's positions.
    Raises ModelError.
    """
    sections = [raw.section(name) for name in ("rope_scaling", "rope_parameters")]
    ropes = [_parse(raw, section, max_position_embeddings, default_theta, rules) for section in sections if section]
    if len(set(ropes)) > 1:  # libraries differ in which they take
        raise ModelError("config.json: rope_scaling and rope_parameters differ: remove one of them")
    rope = ropes[0] if ropes else _parse(raw, sections[0], max_position_embeddings, default_theta, rules)
    return rope.for_lengths(max_position_embeddings)


def parse_partial_rotary_factor(raw: ConfigSettings) -> float:
    """Returns the share of a head's numbers that are rotated, the first ones. Raises ModelError."""
    sections = [raw.section(name) for name in ("rope_scaling", "rope_parameters")]
    beside = raw.number("partial_rotary_factor", 1.0)
    found = {section.number("partial_rotary_factor", beside) for section in sections}
    if len(found) > 1 or max(found) > 1:
        shown = next((one for one in (*sections, raw) if one.value("partial_rotary_factor") is not None), raw)
        raise shown.refusal("partial_rotary_factor", "is not supported (one of at most 1.0)")
    return found.pop()


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
    rules = ROPE_OF_ALL_LENGTHS
    ropes = [_parse(raw, each, max_position_embeddings, default_theta, rules) for each in (full, older) if each]
    if len(set(ropes)) > 1:
        raise ModelError("config.json: rope_scaling and rope_parameters differ: remove one of them")
    whole = ropes[0] if ropes else _parse(raw, full, max_position_embeddings, default_theta, rules)
    return whole, _parse(raw, local, max_position_embeddings, default_theta, rules, local_theta)


def _parse(
    raw: ConfigSettings,
    section: ConfigSettings,
    max_position_embeddings: int,
    default_theta: float,
    rules: RopeRules,
    theta: float | None = None,
) -> Rope:
    """Returns the parameters of one of the two objects; what it does not have may lie beside it. theta: a base that
    stands above what lies beside it.
    """
    for settings in (raw, section):
        if not rules.is_partial and settings.number("partial_rotary_factor", 1.0) != 1.0:
            raise settings.refusal("partial_rotary_factor", "is not supported (only 1.0)")
    older = section.text("type")
    named = section.text("rope_type", older or "default") or "default"
    kind = dict(rules.renamed).get(named, named)
    known = rules.kinds or (*_KINDS, "dynamic", "longrope")
    if kind not in known:
        key = "type" if named == older else "rope_type"
        raise section.refusal(key, f"is not supported (supported: {', '.join(known)})")
    theta = section.number("rope_theta", raw.number("rope_theta", default_theta) if theta is None else theta)
    match kind:
        case "dynamic":
            return Rope(theta, _dynamic(section, max_position_embeddings))
        case "longrope":
            return Rope(theta, _longrope(raw, section, max_position_embeddings, rules))
    context = raw.integer(_CONTEXT, max_position_embeddings)
    if raw.value(_CONTEXT) is not None and section.value(_CONTEXT, context) != context:
        raise raw.refusal(_CONTEXT, "differs from that of the rope")  # libraries differ in which they take
    return Rope(theta, _KINDS[kind](section, context))


def _none(section: ConfigSettings, context: int) -> None:
    return None


def _linear(section: ConfigSettings, context: int) -> LinearScaling:
    return LinearScaling(section.number("factor"))


def _dynamic(section: ConfigSettings, max_position_embeddings: int) -> DynamicScaling:
    return DynamicScaling(section.number("factor"), max_position_embeddings, longest=max_position_embeddings)


def _longrope(
    raw: ConfigSettings, section: ConfigSettings, max_position_embeddings: int, rules: RopeRules
) -> LongRopeScaling:
    """Returns the scaling. `transformers` takes the context beside the object first, or the family's own."""
    context = raw.integer(_CONTEXT, rules.default_context or section.integer(_CONTEXT, max_position_embeddings))
    if section.integer(_CONTEXT, context) != context:
        raise section.refusal(_CONTEXT, f"is not supported beside a model's {context}")
    factor = section.number("factor", max_position_embeddings / context)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
    return LongRopeScaling(
        short_factors=_factors(section, "short_factor"),
        long_factors=_factors(section, "long_factor"),
        attention_factor=section.number("attention_factor", attention_factor),
        original_max_position_embeddings=context,
        is_long=False,
    )


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
    return FrequencyFactors(_factors(section, "factors"))


def _factors(section: ConfigSettings, key: str) -> tuple[float, ...]:
    factors = section.value(key)
    if not isinstance(factors, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise section.refusal(key, "is no list of positive numbers")
    return tuple(map(float, factors))


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

ROPE_OF_ALL_LENGTHS = RopeRules(kinds=tuple(_KINDS))  # of a family whose rope cannot depend on the longest sequence

# Of a config.json that says nothing of a rope.
GPT_OSS_ROPE = Rope(
    150000.0, YarnScaling(32.0, 0.1 * math.log(32.0) + 1.0, 32.0, 1.0, False, original_max_position_embeddings=4096)
)
