"""Words for the parts that a model consists of, for a person who asks whether it can be served."""

from collections.abc import Mapping

from services.engine.models.config import DecoderConfig
from services.engine.models.encoder_config import EncoderConfig
from services.engine.models.families import FAMILIES
from services.engine.models.model_config import ModelConfig
from services.engine.models.opt_config import OptConfig
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
from services.engine.quantization.schemes import Scheme

_SCALINGS: dict[type[Scaling], str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    FrequencyFactors: "factors by frequency",
    DynamicScaling: "dynamic",
    LongRopeScaling: "longrope",
}


def described_parts(config: ModelConfig) -> dict[str, str]:
    """Returns words for each part, by the part's name, in the order of the computation."""
    return {
        "embedding": f"{config.vocab_size} tokens, {config.hidden_size} wide",
        "positions": _positions(config),
        "attention": _attention(config),
        "MLP": _mlp(config),
        "norms": _norms(config),
        "output": _output(config),
        **({} if config.scheme is None else {"stored as": _stored(config.scheme)}),
    }


def _stored(scheme: Scheme) -> str:
    return "; ".join(dict.fromkeys(layer.form for _, layer in scheme.targets))


def _output(config: ModelConfig) -> str:
    if not config.generates:
        return "a score, by a head" if config.num_labels else "embeddings"
    return "the embedding's weights" if config.tie_word_embeddings else "weights of its own"


def _positions(config: ModelConfig) -> str:
    if config.rope is None:
        return f"learned, {config.max_position_embeddings}"
    return f"rotary{_scaling(config.rope)}, theta {config.rope.theta:g}, {config.max_position_embeddings}"


def _scaling(rope: Rope) -> str:
    return "" if rope.scaling is None else f" ({_SCALINGS[type(rope.scaling)]})"


def _attention(config: ModelConfig) -> str:
    heads = f"{config.num_heads} heads of {config.head_dim}"
    shared = "" if config.num_kv_heads == config.num_heads else f" over {config.num_kv_heads} of K and V"
    if isinstance(config, DecoderConfig) and config.latent is not None:
        latent = config.latent
        heads, shared = f"{config.num_heads} heads of {latent.query_dim}", f" over latents of {latent.width}"
    both = "" if config.is_causal else ", both ways"
    return f"{config.num_layers} layers, {heads}{shared}{_windows(config)}{both}{_details(config)}"


def _windows(config: ModelConfig) -> str:
    if config.windows:
        near = [window for window in config.windows if window is not None]
        return f", window of {' or '.join(map(str, sorted(set(near))))} tokens in {len(near)} of them"
    return "" if config.window is None else f", window of {config.window} tokens"


def _details(config: ModelConfig) -> str:
    match config:
        case DecoderConfig():
            biases = {"Q, K and V": config.qkv_bias, "the output": config.output_bias}
            biased = " and ".join(name for name, has in biases.items() if has)
            more = {
                "norms of the heads of Q and K": config.qk_norm,
                f"scores capped at {config.attention_softcap or 0:g}": config.attention_softcap,
                "sinks": config.attention_sinks,
            }
            return "".join(f", {words}" for words in (biased and f"biases on {biased}", *_those(more)) if words)
        case OptConfig():
            return ", biases" if config.bias else ""
        case EncoderConfig() if any(config.reaches):
            near = [reach for reach in config.reaches if reach is not None]
            return f", near tokens alone (up to {near[0]} away) in {len(near)} of them"
    return ""


def _mlp(config: ModelConfig) -> str:
    words = f"{config.intermediate_size} wide, {_activation(config)}"
    if not isinstance(config, DecoderConfig) or (experts := config.experts) is None:
        return words
    shared = f", one of {experts.shared_size} for all tokens" if experts.shared_size else ""
    chosen = f"{experts.top_k} of {experts.num_experts} experts of {experts.intermediate_size}{shared}"
    if len(experts.layers) == config.num_layers:
        return f"{chosen}, {_activation(config)}"
    return f"{words}; in {len(experts.layers)} layers {chosen}"


def _activation(config: ModelConfig) -> str:
    match config:
        case OptConfig():
            return "ReLU"
        case EncoderConfig():
            return f"{'gated by ' if config.is_modern else ''}{config.activation}"
        case DecoderConfig():
            gate = "SiLU" if config.activation == "silu" else config.activation
            return f"gated by {gate}{', biases' if config.mlp_bias else ''}"
    return "gated by SiLU"


def _those(words: Mapping[str, object]) -> list[str]:
    return [name for name, has in words.items() if has]


def _norms(config: ModelConfig) -> str:
    match config:
        case OptConfig():
            return f"LayerNorm, {'before' if config.norm_first else 'after'} attention and MLP"
        case EncoderConfig():
            return f"LayerNorm, {'before' if config.is_modern else 'after'} attention and MLP"
        case DecoderConfig():
            norms = FAMILIES[config.architecture].norms
            has = {
                "before": norms.before_attention or norms.before_mlp,
                "after": norms.after_attention or norms.after_mlp,
            }
            return f"RMSNorm, {' and '.join(_those(has))} attention and MLP"
    return "RMSNorm, before attention and MLP"
