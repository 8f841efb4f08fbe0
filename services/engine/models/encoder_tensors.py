"""The tensors that checkpoints of encoders must have, by name."""

from services.engine.models.encoder_config import EncoderConfig
from services.engine.models.model_config import Shard
from services.engine.models.shapes import Shapes, Shares, linear_shapes
from services.protocol.model_files.base import ModelError


def bert_shapes(config: EncoderConfig) -> Shapes:
    """Returns the shapes of the tensors of BERT and of models of its kind."""
    hidden, prefix = config.hidden_size, config.prefix
    shapes: Shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        f"{prefix}embeddings.position_embeddings.weight": (config.num_positions, hidden),
        f"{prefix}embeddings.token_type_embeddings.weight": (config.num_token_types, hidden),
    }
    shapes |= _norm_shapes(f"{prefix}embeddings.LayerNorm", hidden, bias=True)
    for layer in range(config.num_layers):
        shapes |= _bert_layer_shapes(config, f"{prefix}encoder.layer.{layer}.")
    return shapes


def _bert_layer_shapes(config: EncoderConfig, prefix: str) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {}
    for name in ("query", "key", "value"):
        shapes |= linear_shapes(f"{prefix}attention.self.{name}", hidden, hidden, bias=True)
    shapes |= linear_shapes(f"{prefix}attention.output.dense", hidden, hidden, bias=True)
    shapes |= _norm_shapes(f"{prefix}attention.output.LayerNorm", hidden, bias=True)
    shapes |= linear_shapes(f"{prefix}intermediate.dense", inner, hidden, bias=True)
    shapes |= linear_shapes(f"{prefix}output.dense", hidden, inner, bias=True)
    return shapes | _norm_shapes(f"{prefix}output.LayerNorm", hidden, bias=True)


def bert_classifier_shapes(config: EncoderConfig) -> Shapes:
    """Returns the shapes of the tensors of the cross encoders of BERT's kind."""
    return bert_shapes(config) | _head_shapes(config)


def _head_shapes(config: EncoderConfig) -> Shapes:
    hidden, (dense, output) = config.hidden_size, config.head_names
    shapes = linear_shapes(dense, hidden, hidden, config.head_bias)
    return shapes | linear_shapes(output, config.num_labels, hidden, bias=True)


def modernbert_classifier_shapes(config: EncoderConfig) -> Shapes:
    """Returns the shapes of the tensors of ModernBERT's cross encoders."""
    norm = _norm_shapes("head.norm", config.hidden_size, config.norm_bias)
    return modernbert_shapes(config) | norm | _head_shapes(config)


def modernbert_shapes(config: EncoderConfig) -> Shapes:
    """Returns the shapes of ModernBERT's tensors."""
    hidden, inner, prefix = config.hidden_size, config.intermediate_size, "model."
    shapes: Shapes = {f"{prefix}embeddings.tok_embeddings.weight": (config.vocab_size, hidden)}
    norms = ["embeddings.norm", "final_norm"]
    for layer in range(config.num_layers):
        name = f"layers.{layer}."
        shapes |= linear_shapes(f"{prefix}{name}attn.Wqkv", 3 * hidden, hidden, config.attention_bias)
        shapes |= linear_shapes(f"{prefix}{name}attn.Wo", hidden, hidden, config.attention_bias)
        shapes |= linear_shapes(f"{prefix}{name}mlp.Wi", 2 * inner, hidden, config.mlp_bias)
        shapes |= linear_shapes(f"{prefix}{name}mlp.Wo", hidden, inner, config.mlp_bias)
        norms += [f"{name}attn_norm"] * (layer > 0) + [f"{name}mlp_norm"]
    for name in norms:
        shapes |= _norm_shapes(f"{prefix}{name}", hidden, config.norm_bias)
    return shapes


def encoder_shares(config: EncoderConfig, shard: Shard) -> Shares:
    """Raises ModelError: ranks share no encoder."""
    raise ModelError(f"{config.architecture} is not shared out among ranks")


def _norm_shapes(name: str, size: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if bias else {})}
