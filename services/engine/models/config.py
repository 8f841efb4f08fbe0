"""The decoder's shape, read from a Hugging Face config.json.

One parametrised decoder serves every family; the differences of a family are its entry in `FAMILIES`. A setting that
would change the computation and is not implemented is refused by name: no setting is accepted and ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.base import ModelConfig, read_dtype
from services.engine.models.rope_settings import FrequencyFactors, parse_rope
from services.engine.models.settings import read_bool, read_float, read_int, require_value
from services.protocol.model_files.base import ModelError, Settings


def no_window(raw: Settings) -> int | None:
    """Returns None: every layer sees all earlier tokens."""
    require_value(raw, "use_sliding_window", False)
    _require_layer_types(raw, "full_attention")
    return None


def window_of_all_layers(raw: Settings) -> int | None:
    """Returns Mistral's window: `sliding_window`, null for none."""
    window = None if raw.get("sliding_window", 4096) is None else read_int(raw, "sliding_window", 4096)
    _require_layer_types(raw, "full_attention" if window is None else "sliding_attention")
    return window


def window_of_marked_layers(raw: Settings) -> int | None:
    """Returns Qwen's window: `use_sliding_window`, for the layers from `max_window_layers` on, or by `layer_types`."""
    if not read_bool(raw, "use_sliding_window") or raw.get("sliding_window", 4096) is None:
        _require_layer_types(raw, "full_attention")
        return None
    num_layers, first = read_int(raw, "num_hidden_layers"), raw.get("max_window_layers", 28)
    derived = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    kinds = set(raw.get("layer_types") or derived)
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ModelError("config.json: use_sliding_window in some of the layers is not supported, in all of them it is")
    return read_int(raw, "sliding_window", 4096)


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of an architecture from the plain decoder."""

    qkv_bias: bool = False  # Q, K and V always have a bias
    optional_biases: tuple[str, ...] = ()  # config.json's attention_bias and mlp_bias, if the family heeds them
    qk_norm: bool = False  # RMSNorm over each head of Q and K, before the rotary embedding
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    window: Callable[[Settings], int | None] = no_window  # reads config.json


FAMILIES = {
    "LlamaForCausalLM": Family(optional_biases=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(window=window_of_all_layers),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=window_of_marked_layers),
    "Qwen3ForCausalLM": Family(
        optional_biases=("attention_bias",), qk_norm=True, default_head_dim=128, window=window_of_marked_layers
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """All that the decoder's computation depends on, weights aside."""

    intermediate_size: int
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


def parse_decoder_config(raw: Settings, architecture: str) -> DecoderConfig:
    """Returns the shape that config.json's values describe for a family. Raises ModelError."""
    family = FAMILIES[architecture]
    require_value(raw, "hidden_act", "silu")
    hidden_size, num_heads = read_int(raw, "hidden_size"), read_int(raw, "num_attention_heads")
    num_kv_heads = read_int(raw, "num_key_value_heads", num_heads)
    head_dim = read_int(raw, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, the rotary embedding needs an even one")
    max_position_embeddings = read_int(raw, "max_position_embeddings")
    rope = parse_rope(raw, max_position_embeddings)
    if isinstance(rope.scaling, FrequencyFactors) and len(rope.scaling.factors) != head_dim // 2:
        raise ModelError(f"config.json: {len(rope.scaling.factors)} factors of the rope, for heads of {head_dim}")
    attention_bias, mlp_bias = (
        key in family.optional_biases and read_bool(raw, key) for key in ("attention_bias", "mlp_bias")
    )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=read_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_int(raw, "intermediate_size"),
        num_layers=read_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_float(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        window=family.window(raw),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=read_bool(raw, "tie_word_embeddings"),
        dtype=read_dtype(raw),
    )


def _require_layer_types(raw: Settings, only: str) -> None:
    for kind in raw.get("layer_types") or ():
        if kind != only:
            raise ModelError(f"config.json: layer_types with {kind!r} is not supported (only {only!r} here)")
