"""The decoder's weights: read, checked, cast, fused, and packed for the matrix library.

Q, K and V rows are one matrix, and so are gate and up: fewer and larger products. All tensors are checked before the
first is read, so a checkpoint that does not fit fails at once.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.engine.models.checkpoint import Checkpoint
from services.engine.models.config import ModelConfig
from services.engine.models.linear import Linear
from services.protocol.model_dir import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim, rows in the order Q, K, V
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: the weight for each head of Q, then of K
    output: Linear  # heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate, gate first
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All of a model's weights, in one dtype."""

    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Reads a checkpoint. Raises ModelError, before reading, for anything missing, misshapen or unexpected."""
    with Checkpoint(directory) as checkpoint:
        _check(checkpoint, config)
        return _Loader(checkpoint, config, dtype).model()


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype that the checkpoint's embedding is stored in, for a config.json that does not say."""
    with Checkpoint(directory) as checkpoint:
        return checkpoint.dtype("model.embed_tokens.weight")


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this shape holds."""
    return sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape must have."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    attention["o_proj"] = (hidden, q_size)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for block, matrices, has_bias in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        shapes |= {f"{block}.{name}.weight": shape for name, shape in matrices.items()}
        if has_bias:
            shapes |= {f"{block}.{name}.bias": shape[:1] for name, shape in matrices.items()}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _check(checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        checkpoint.check(name, shape)
    for name in sorted(checkpoint.names - expected.keys()):
        if not _is_redundant(name, config):
            raise ModelError(
                f"{checkpoint.home(name)}: tensor {name} is not part of {config.architecture} as config.json has it"
            )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """True for tensors that repeat what is known: stored rotary frequencies, and the head of a tied model."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


class _Loader:
    """Builds weights from a checked checkpoint, one layer after the other."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype

    def model(self) -> ModelWeights:
        embedding = self._vector("model.embed_tokens.weight")
        head = embedding if self._config.tie_word_embeddings else self._read("lm_head.weight")
        return ModelWeights(
            dtype=self._dtype,
            embedding=embedding,
            layers=tuple(self._layer(f"model.layers.{layer}.") for layer in range(self._config.num_layers)),
            final_norm=self._vector("model.norm.weight"),
            lm_head=Linear(head, None),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        attention, mlp, config = f"{prefix}self_attn.", f"{prefix}mlp.", self._config
        return LayerWeights(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=self._fused([f"{attention}{name}_proj" for name in "qkv"], config.attention_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=self._fused([f"{attention}o_proj"], config.attention_bias),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._fused([f"{mlp}gate_proj", f"{mlp}up_proj"], config.mlp_bias),
            down=self._fused([f"{mlp}down_proj"], config.mlp_bias),
        )

    def _fused(self, names: list[str], has_bias: bool) -> Linear:
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        bias = torch.cat([self._read(f"{name}.bias") for name in names]) if has_bias else None
        return Linear(weight, bias)

    def _qk_norm(self, attention: str) -> Tensor:
        q_norm = self._vector(f"{attention}q_norm.weight").expand(self._config.num_heads, -1)
        k_norm = self._vector(f"{attention}k_norm.weight").expand(self._config.num_kv_heads, -1)
        return torch.cat((q_norm, k_norm))

    def _vector(self, name: str) -> Tensor:
        """A tensor that is kept as it is: a copy, since the file may change once it is closed."""
        return self._read(name).clone()

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name, self._dtype)
