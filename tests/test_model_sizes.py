"""The README's table of models and memory: the arithmetic is the code's own."""

from kvtransfer.layout import KvLayout
from services.engine.models.architectures import parse_model_config, weight_bytes
from tests.engine.models.published_configs import PUBLISHED
from tests.test_docs import ROOT, rows

MODELS = {
    "Qwen3-0.6B": "Qwen3",
    "Llama-3.2-1B": "Llama 3.2",
    "Mistral-7B-v0.3": "Mistral 0.3",
    "Llama-3.1-8B": "Llama 3.1",
    "Mistral-Nemo-12B": "Mistral Nemo",
}
KV_TOKENS = 8192


def row(name: str, published: str) -> list[str]:
    """Weights of one worker in bfloat16, KV of so many tokens, both for one worker and for a pair; in GiB."""
    config = parse_model_config(dict(PUBLISHED[published]))
    block = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, "bfloat16").block_bytes
    weights, kv = weight_bytes(config, 2), KV_TOKENS // 16 * block
    return [name, *(f"{size / 2**30:.1f}" for size in (weights, kv, weights + kv, 2 * (weights + kv)))]


def test_the_readme_has_the_memory_that_the_code_computes() -> None:
    assert list(rows(ROOT / "README.md", "## What it needs")) == [row(*each) for each in MODELS.items()]
