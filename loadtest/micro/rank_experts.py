"""Steps of a model with experts on ranks that have whole experts, in turns with ranks that have columns of all, and
with one process.
"""

import json
import tempfile
from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp

# A model with 1 GB of weights, most of them in the experts.
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def measure(model: Path | None, ranks: int, context: int, rounds: int) -> list[Record]:
    """Returns a record for each kind of step."""
    load_openmp()  # before torch is imported
    from loadtest.micro import expert_turns

    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            model = Path(directory)
            (model / "config.json").write_text(json.dumps(_CONFIG))
        return expert_turns.measure(model, ranks, context, rounds)
