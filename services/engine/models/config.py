"""The decoder's shape, read from a Hugging Face config.json.

One parametrised decoder serves every family; what sets a family apart is its entry in `FAMILIES`. A setting that would
change the computation and is not implemented is refused by name: nothing is accepted and ignored.
"""

import math
from dataclasses import dataclass
from typing import Any

from services.protocol.model_dir import ModelError, require_int

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from the plain decoder."""

    qk_norm: bool = False  # RMSNorm over each head of Q and K, before the rotary embedding
    mlp_bias: bool = False  # config.json's mlp_bias means something
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128),
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies stretched by wavelength, as Llama 3.1 does it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the decoder's computation depends on, weights aside."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str | None  # of the checkpoint, where config.json says it

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return 1 / math.sqrt(self.head_dim)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """The shape that config.json's values describe. Raises ModelError."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    _refuse_unsupported(raw)
    hidden_size, num_heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
    num_kv_heads = _int(raw, "num_key_value_heads", num_heads)
    head_dim = _int(raw, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, the rotary embedding needs an even one")
    max_position_embeddings = _int(raw, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size"),
        num_layers=_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(raw, max_position_embeddings),
        qk_norm=family.qk_norm,
        attention_bias=_bool(raw, "attention_bias"),
        mlp_bias=family.mlp_bias and _bool(raw, "mlp_bias"),
        tie_word_embeddings=_bool(raw, "tie_word_embeddings"),
        dtype=_dtype(raw),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, a list with one name was expected")
    if names[0] not in FAMILIES:
        raise ModelError(f"architecture {names[0]} is not supported (supported: {', '.join(FAMILIES)})")
    return str(names[0])


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported (only 'silu')")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"config.json: quantization_config is not supported (quant_method {method!r})")
    if raw.get("use_sliding_window"):
        raise ModelError("config.json: use_sliding_window is not supported")
    other_layers = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other_layers:
        raise ModelError(f"config.json: layer_types with {other_layers[0]!r} is not supported (only 'full_attention')")


def _rope(raw: dict[str, Any], max_position_embeddings: int) -> Rope:
    """From transformers 5's `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    values = raw.get(where) or {}
    if not isinstance(values, dict):
        raise ModelError(f"config.json: {where} is {values!r}, an object was expected")
    if float(values.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ModelError("config.json: partial_rotary_factor is not supported")
    theta = _float(values, "rope_theta", _float(raw, "rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise ModelError(f"config.json: rope type {kind!r} is not supported (only 'default' and 'llama3')")
    return Rope(
        theta,
        Llama3Scaling(
            factor=_float(values, "factor"),
            low_freq_factor=_float(values, "low_freq_factor"),
            high_freq_factor=_float(values, "high_freq_factor"),
            original_max_position_embeddings=_int(values, "original_max_position_embeddings", max_position_embeddings),
        ),
    )


def _dtype(raw: dict[str, Any]) -> str | None:
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name is not None and name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name


def _int(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    if raw.get(key) is None and default is not None:
        return default
    return require_int(raw, key, "config.json")


def _float(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"config.json: {key} {found}, a positive number was expected")
    return float(value)


def _bool(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {value!r}, true or false was expected")
    return value
