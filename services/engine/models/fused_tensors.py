"""Tensors of several matrices, one below the other: Q, K and V, and gate and up, as in Phi-3's checkpoints."""

from services.engine.models.model_config import ModelConfig, Shard
from services.engine.models.shapes import Shapes, Share, Shares, shares_of_inputs, widened


def fused_attention_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Returns the shapes of an attention's tensors."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.qkv_proj.weight": (q_size + 2 * kv_size, config.hidden_size),
        "self_attn.o_proj.weight": (config.hidden_size, q_size),
    }


def fused_attention_shares(config: ModelConfig, shard: Shard, layer: int) -> Shares:
    """Returns the shares of an attention's tensors that one rank reads: its heads of each matrix."""
    heads, kv_heads = widened(shard.heads, config.head_dim), widened(shard.kv_heads, config.head_dim)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = _slice(heads, 0), _slice(kv_heads, q_size), _slice(kv_heads, q_size + kv_size)
    own: Shares = {"self_attn.qkv_proj.weight": Share(rows=rows)}
    return own | shares_of_inputs("self_attn.o_proj", heads, bias=False)


def fused_mlp_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Returns the shapes of a gated MLP's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {"mlp.gate_up_proj.weight": (2 * inner, hidden), "mlp.down_proj.weight": (hidden, inner)}


def fused_mlp_shares(config: ModelConfig, shard: Shard, layer: int) -> Shares:
    """Returns the shares of a gated MLP's tensors that one rank reads: its columns of gate and of up."""
    own = shard.intermediate
    rows = _slice(own, 0), _slice(own, config.intermediate_size)
    gate_up: Shares = {"mlp.gate_up_proj.weight": Share(rows=rows)}
    return gate_up | shares_of_inputs("mlp.down_proj", own, bias=False)


def _slice(own: range, first: int) -> slice:
    """Returns the place of rows in a matrix that begins at row `first`."""
    return slice(first + own.start, first + own.stop)
