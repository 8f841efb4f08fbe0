"""Rotary embedding at absolute positions, against `transformers`."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.engine.models.config import Llama3Scaling, Rope
from services.engine.models.rope import apply_rotation, inverse_frequencies, rotation

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotation_equals_transformers(scaling: dict[str, Any] | None, head_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 8191, 100_000])
    heads = torch.randn(6, 3, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = {"rope_theta": 5e5, "rope_type": "llama3" if scaling else "default", **(scaling or {})}
    config = LlamaConfig(head_dim=head_dim, hidden_size=3 * head_dim, num_attention_heads=3, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rope = Rope(5e5, Llama3Scaling(**scaling) if scaling else None)
    found = apply_rotation(heads, *rotation(inverse_frequencies(rope, head_dim), positions, dtype))
    torch.testing.assert_close(
        found, expected[0].transpose(0, 1), atol=1e-6 if dtype == torch.float32 else 0.03, rtol=0
    )
    assert torch.equal(found[0], heads[0]), "position 0 is not turned"
