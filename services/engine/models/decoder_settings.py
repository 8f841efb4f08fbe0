"""The decoder's shape, read from a Hugging Face config.json, and the tensors that a checkpoint must have for it.

One parametrised decoder serves every family; the differences of a family are its entry in `FAMILIES`. A setting that
would change the computation and is not implemented is refused by name: no setting is accepted and ignored.
"""

from dataclasses import replace

from services.engine.models.config import SCORE, DecoderConfig, layer_prefix
from services.engine.models.families import FAMILIES, Family
from services.engine.models.label_settings import read_num_labels, read_score_tokens
from services.engine.models.model_config import Shard, read_dtype
from services.engine.models.rope_config import DynamicScaling, FrequencyFactors, LongRopeScaling, Rope
from services.engine.models.rope_settings import (
    ROPE_OF_ALL_LENGTHS,
    parse_partial_rotary_factor,
    parse_rope,
    parse_ropes_of_types,
)
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import (
    Shapes,
    Shares,
    shares_of_vocabulary,
)
from services.engine.models.window_settings import (
    Windows,
)
from services.protocol.model_files.base import ModelError


def parse_decoder_config(raw: ConfigSettings, architecture: str) -> DecoderConfig:
    """Returns the shape that config.json's values describe for a family. Raises ModelError."""
    family = FAMILIES[architecture]
    raw.require("hidden_act", family.activation)
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    latent = None if family.latent is None else family.latent(raw)
    if latent is None:
        num_kv_heads, head_dim = _kv_heads(raw, family, num_heads, hidden_size // num_heads)
        partial_rotary_factor = parse_partial_rotary_factor(raw) if family.rope.is_partial else 1.0
        rotary_dim = int(head_dim * partial_rotary_factor)
    else:
        num_kv_heads, head_dim, rotary_dim = 1, latent.width, latent.rope_dim
        partial_rotary_factor = 1.0
    max_position_embeddings = raw.integer("max_position_embeddings")
    rope, local_rope = _parse_ropes(raw, family, max_position_embeddings)
    _check_rotary_dim(rope, rotary_dim)
    is_causal, windows = raw.flag("is_causal", True), family.windows(raw)
    plain = latent is None and family.own_settings is None and not family.attention_sinks
    if not is_causal and not (plain and windows == Windows()):
        words = "beside a sliding window" if plain else "for this architecture"
        raise raw.refusal("is_causal", f"is not supported {words}")
    attention_bias, mlp_bias = (_has_bias(raw, key, family) for key in ("attention_bias", "mlp_bias"))
    qkv_bias = family.qkv_bias or ("qkv_bias" in family.optional_biases and raw.flag("qkv_bias", True))
    num_layers = raw.integer("num_hidden_layers")
    score_tokens = read_score_tokens(raw, architecture) if family.scores else ()
    has_head = family.scores and not score_tokens
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", family.default_eps),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        window=windows.widest,
        windows=windows.of_layers,
        is_causal=is_causal,
        qk_norm=family.qk_norm,
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        experts=None if family.experts is None else family.experts(raw, num_layers),
        tie_word_embeddings=raw.flag("tie_word_embeddings", family.tied_by_default) and not has_head,
        num_labels=read_num_labels(raw) if has_head else len(score_tokens[:1]),
        score_tokens=score_tokens,
        dtype=read_dtype(raw),
        num_mtp_layers=0 if family.default_mtp_layers is None else _num_mtp_layers(raw, family.default_mtp_layers),
        latent=latent,
        norm_offset=family.norm_offset,
        wide_qk_norm=family.wide_qk_norm,
        partial_rotary_factor=partial_rotary_factor,
        activation=family.activation,
        local_rope=local_rope,
        attention_sinks=family.attention_sinks,
    )
    return config if family.own_settings is None else replace(config, **family.own_settings(raw))


def _num_mtp_layers(raw: ConfigSettings, default: int) -> int:
    """Returns the layers for the prediction of further tokens, under either name."""
    newer = raw.integer("num_mtp_layers", default, least=0)
    return raw.integer("num_nextn_predict_layers", newer, least=0)


def _kv_heads(raw: ConfigSettings, family: Family, num_heads: int, plain_head_dim: int) -> tuple[int, int]:
    """Returns the number of KV heads and their width."""
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    head_dim = raw.integer("head_dim", family.default_head_dim or plain_head_dim)
    if num_heads % num_kv_heads:
        raise raw.refusal("num_key_value_heads", f"cannot be shared evenly by {num_heads} attention heads")
    if head_dim < 1 or head_dim % 2:
        raise ModelError(
            f"config.json: head_dim (by default hidden_size / num_attention_heads) is {head_dim}, the rotary embedding "
            "needs an even one"
        )
    return num_kv_heads, head_dim


def decoder_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of all tensors that a checkpoint of this shape must have."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if config.num_labels and not config.score_tokens:
        shapes[SCORE] = (config.num_labels, config.hidden_size)
    elif not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {f"{layer_prefix(layer)}{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def decoder_shares(config: DecoderConfig, shard: Shard) -> Shares:
    """Returns the shares of tensors that one rank reads: its heads, its columns of the MLP, its tokens' rows."""
    family = FAMILIES[config.architecture]
    tied = config.tie_word_embeddings or bool(config.num_labels)
    shares = shares_of_vocabulary("model.embed_tokens.weight", shard.vocabulary, tied=tied)
    for layer in range(config.num_layers):
        of_layer = family.attention.shares(config, shard, layer) | family.mlp.shares(config, shard, layer)
        shares |= {f"{layer_prefix(layer)}{name}": share for name, share in of_layer.items()}
    return shares


def _parse_ropes(raw: ConfigSettings, family: Family, context: int) -> tuple[Rope, Rope | None]:
    """Returns the rope, and that of layers with a window if it is another one."""
    if family.default_local_theta is not None:
        return parse_ropes_of_types(raw, context, family.default_theta, family.default_local_theta)
    if family.default_rope is not None and not raw.section("rope_scaling") and not raw.section("rope_parameters"):
        return replace(family.default_rope, theta=raw.number("rope_theta", family.default_rope.theta)), None
    rules = family.rope if family.latent is None else ROPE_OF_ALL_LENGTHS
    return parse_rope(raw, context, family.default_theta, rules), None


def _check_rotary_dim(rope: Rope, rotary_dim: int) -> None:
    """Raises ModelError unless a rope fits heads of which so many numbers are rotated."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor rotates {rotary_dim} numbers of a head, an even number is needed"
        )
    match rope.scaling:
        case FrequencyFactors(factors):
            lists = [factors]
        case LongRopeScaling(short_factors=short, long_factors=long):
            lists = [short, long]
        case DynamicScaling() if rotary_dim == 2:
            raise ModelError("config.json: a dynamic rope needs more than 2 numbers of a head")
        case _:
            lists = []
    for factors in lists:
        if len(factors) != rotary_dim // 2:
            raise ModelError(f"config.json: {len(factors)} factors of the rope, for {rotary_dim} numbers of a head")


def _has_bias(raw: ConfigSettings, key: str, family: Family) -> bool:
    """Returns True if the setting asks for biases that the family does not always have."""
    if key in family.optional_biases:
        return raw.flag(key, key == "attention_bias" and family.biased_by_default)
    if key == "attention_bias" and family.qkv_bias:
        raw.disregard(key)  # such models have their biases whatever it says, and tensors that fit nothing else
    else:
        raw.require(key, False)
    return False


def _layer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    family, hidden = FAMILIES[config.architecture], config.hidden_size
    norms: Shapes = {f"{name}.weight": (hidden,) for name in family.norms.names}
    return norms | family.attention.shapes(config, layer) | family.mlp.shapes(config, layer)
