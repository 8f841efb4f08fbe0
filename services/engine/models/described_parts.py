"""Words for the parts that a model consists of, for a person who asks whether it can be served."""

from services.engine.models.config import DecoderConfig
from services.engine.models.encoder_config import EncoderConfig
from services.engine.models.model_config import ModelConfig
from services.engine.models.opt_config import OptConfig
from services.engine.models.rope_settings import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)

_SCALINGS: dict[type[Scaling], str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    FrequencyFactors: "factors by frequency",
}


def described_parts(config: ModelConfig) -> dict[str, str]:
    """Returns words for each part, by the part's name, in the order of the computation."""
    return {
        "embedding": f"{config.vocab_size} tokens, {config.hidden_size} wide",
        "positions": _positions(config),
        "attention": _attention(config),
        "MLP": f"{config.intermediate_size} wide, {_mlp(config)}",
        "norms": _norms(config),
        "output": _output(config),
    }


def _output(config: ModelConfig) -> str:
    if not config.is_causal:
        return "a score, by a head" if isinstance(config, EncoderConfig) and config.num_labels else "embeddings"
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
    window = "" if config.window is None else f", window of {config.window} tokens"
    both = "" if config.is_causal else ", both ways"
    return f"{config.num_layers} layers, {heads}{shared}{window}{both}{_details(config)}"


def _details(config: ModelConfig) -> str:
    match config:
        case DecoderConfig():
            biases = {"Q, K and V": config.qkv_bias, "the output": config.output_bias}
            biased = " and ".join(name for name, has in biases.items() if has)
            normed = ", norms of the heads of Q and K" if config.qk_norm else ""
            return (f", biases on {biased}" if biased else "") + normed
        case OptConfig():
            return ", biases" if config.bias else ""
        case EncoderConfig() if any(config.reaches):
            near = [reach for reach in config.reaches if reach is not None]
            return f", near tokens alone (up to {near[0]} away) in {len(near)} of them"
    return ""


def _mlp(config: ModelConfig) -> str:
    match config:
        case OptConfig():
            return "ReLU"
        case EncoderConfig():
            return f"{'gated by ' if config.is_modern else ''}{config.activation}"
        case DecoderConfig(mlp_bias=True):
            return "gated by SiLU, biases"
    return "gated by SiLU"


def _norms(config: ModelConfig) -> str:
    match config:
        case OptConfig():
            return f"LayerNorm, {'before' if config.norm_first else 'after'} attention and MLP"
        case EncoderConfig():
            return f"LayerNorm, {'before' if config.is_modern else 'after'} attention and MLP"
    return "RMSNorm, before attention and MLP"
