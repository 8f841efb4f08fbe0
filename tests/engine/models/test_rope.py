"""Rotary embedding at absolute positions, against `transformers`."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.engine.kernels.torch_operations import TorchOperations
from services.engine.models.rope import inverse_frequencies, magnitude, rotation
from services.engine.models.rope_settings import parse_rope
from services.engine.models.settings import ConfigSettings

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2.5, "truncate": False},
    "yarn-mscale": YARN | {"mscale": 1.5, "mscale_all_dim": 0.8},
    "yarn-one-mscale": YARN | {"mscale": 1.5},
    "yarn-no-ramp": YARN | {"original_max_position_embeddings": 8, "beta_fast": 1.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("longest", [100, 128, 129, 500])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_of_the_longest_sequence_is_that_of_transformers_for_it(kind: str, longest: int) -> None:
    """Within the original context of 128 tokens, and beyond it."""
    lists = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
    more = {"factor": 4.0} if kind == "dynamic" else lists | {"original_max_position_embeddings": 128}
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e5, **more}
    positions = 128 if kind == "dynamic" else 512
    config = LlamaConfig(
        head_dim=16,
        hidden_size=48,
        num_attention_heads=3,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(longest)[None])
    parsed = parse_rope(ConfigSettings({"rope_parameters": parameters}), positions)
    rope = parsed.for_lengths(longest)
    assert (rope == parsed.for_lengths(10)) == (longest <= 128), "its KV is another's"
    found_cos, found_sin = rotation(
        inverse_frequencies(rope, 16), torch.arange(longest), torch.float32, magnitude(rope)
    )
    torch.testing.assert_close(found_cos[:, 0], cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(found_sin[:, 0, 8:], sin[0, :, 8:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotation_equals_transformers(name: str, head_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 8191, 100_000])
    heads = torch.randn(6, 3, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = {"rope_theta": 5e5, **PARAMETERS[name]}
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=3 * head_dim, num_attention_heads=3, rope_parameters=dict(parameters)
    )
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rope = parse_rope(ConfigSettings({"rope_parameters": parameters}), config.max_position_embeddings)
    turn = rotation(inverse_frequencies(rope, head_dim), positions, dtype, magnitude(rope))
    found = heads.clone()
    TorchOperations().rotate(found, *turn, None, 0.0)
    torch.testing.assert_close(
        found, expected[0].transpose(0, 1), atol=1e-6 if dtype == torch.float32 else 0.03, rtol=0
    )
    if magnitude(rope) == 1:
        assert torch.equal(found[0], heads[0]), "position 0 is not turned"
