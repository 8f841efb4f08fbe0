"""OPT's shape, read from a Hugging Face config.json, and the tensors that a checkpoint must have for it."""

from dataclasses import dataclass

from services.engine.models.model_config import ModelConfig, Shard, read_dtype
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import (
    Shapes,
    Shares,
    linear_shapes,
    shares_of_inputs,
    shares_of_outputs,
    shares_of_vocabulary,
    widened,
)

POSITION_OFFSET = 2  # position p is row p + 2 of the positions' embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """All that OPT's computation depends on, weights aside."""

    embedding_size: int
    norm_first: bool
    final_norm: bool
    bias: bool

    @property
    def output_size(self) -> int:
        """Returns the width that `project_out`, which comes last, leads back to."""
        return self.embedding_size

    @property
    def projects(self) -> bool:
        """Returns True if the embedding has another width than the model."""
        return self.embedding_size != self.hidden_size


def parse_opt_config(raw: ConfigSettings, architecture: str) -> OptConfig:
    """Returns the shape that config.json's values describe. Raises ModelError."""
    raw.require("activation_function", "relu")
    raw.require("layer_norm_elementwise_affine", True)
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise raw.refusal("num_attention_heads", f"cannot share a hidden_size of {hidden_size} evenly")
    norm_first, no_final_norm = raw.flag("do_layer_norm_before", True), raw.flag("_remove_final_layer_norm")
    return OptConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("ffn_dim"),
        embedding_size=raw.integer("word_embed_proj_dim", hidden_size),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=raw.integer("max_position_embeddings"),
        rope=None,
        window=None,
        norm_first=norm_first,
        final_norm=norm_first and not no_final_norm,
        bias=raw.flag("enable_bias", True),
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        dtype=read_dtype(raw),
    )


def opt_shapes(config: OptConfig) -> Shapes:
    """Returns the shapes of all tensors that a checkpoint of this shape must have."""
    hidden, embedding, prefix = config.hidden_size, config.embedding_size, "model.decoder."
    shapes: Shapes = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, embedding),
        f"{prefix}embed_positions.weight": (config.max_position_embeddings + POSITION_OFFSET, hidden),
    }
    if config.projects:
        shapes |= linear_shapes(f"{prefix}project_in", hidden, embedding, bias=False)
        shapes |= linear_shapes(f"{prefix}project_out", embedding, hidden, bias=False)
    if config.final_norm:
        shapes |= _norm_shapes(f"{prefix}final_layer_norm", hidden)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, embedding)
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, f"{prefix}layers.{layer}.")
    return shapes


def opt_shares(config: OptConfig, shard: Shard) -> Shares:
    """Returns the shares of tensors that one rank reads: its heads, its columns of the MLP, its tokens' rows."""
    tied = config.tie_word_embeddings
    shares = shares_of_vocabulary("model.decoder.embed_tokens.weight", shard.vocabulary, tied=tied)
    heads = widened(shard.heads, config.head_dim)
    for layer in range(config.num_layers):
        prefix = f"model.decoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            shares |= shares_of_outputs(f"{prefix}self_attn.{name}", heads, config.bias)
        shares |= shares_of_inputs(f"{prefix}self_attn.out_proj", heads, config.bias)
        shares |= shares_of_outputs(f"{prefix}fc1", shard.intermediate, config.bias)
        shares |= shares_of_inputs(f"{prefix}fc2", shard.intermediate, config.bias)
    return shares


def _layer_shapes(config: OptConfig, prefix: str) -> Shapes:
    hidden, bias = config.hidden_size, config.bias
    shapes = _norm_shapes(f"{prefix}self_attn_layer_norm", hidden) | _norm_shapes(f"{prefix}final_layer_norm", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= linear_shapes(f"{prefix}self_attn.{name}", hidden, hidden, bias)
    shapes |= linear_shapes(f"{prefix}fc1", config.intermediate_size, hidden, bias)
    return shapes | linear_shapes(f"{prefix}fc2", hidden, config.intermediate_size, bias)


def _norm_shapes(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
