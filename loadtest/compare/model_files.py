"""The model that is compared, as a file or a directory: which of the two, and how many tokens it knows."""

import json
from pathlib import Path

from gguf import GGUFReader

_EMBEDDING = "token_embd.weight"


def is_gguf(model: Path) -> bool:
    """Says whether a model is one GGUF file, and no directory of Hugging Face's kind."""
    return model.suffix == ".gguf"


def vocabulary_of(model: Path) -> int:
    """Returns the number of rows of a model's embedding. Raises OSError, ValueError, KeyError."""
    if not is_gguf(model):
        size: int = json.loads((model / "config.json").read_text())["vocab_size"]
        return size
    for tensor in GGUFReader(model).tensors:
        if tensor.name == _EMBEDDING:
            return int(tensor.shape[1])  # GGUF names the depth first
    raise KeyError(f"{model} has no {_EMBEDDING}")
