"""Writes the demo model, which is a GGUF file of 4 bits, as a Hugging Face directory in bfloat16.

    python -m loadtest smollm2 DIR

All servers of a comparison then get the same dequantized weights: Baton and vLLM read DIR, and `loadtest compare`
writes DIR as a BF16 GGUF file for llama.cpp.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.engine.models.architectures import parse_model_config
from services.engine.models.registry import open_tensors
from services.launcher import demo_model
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import GgufFile

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when the directory is written, 2 otherwise."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m loadtest.compare.smollm2 DIR\n")
        return 2
    model = demo_model.find()
    if model.is_random:
        sys.stderr.write(f"smollm2: {model.note}\n")
        return 2
    try:
        write_directory(model.path, Path(arguments[0]))
    except (ModelError, OSError) as error:
        sys.stderr.write(f"smollm2: {error}\n")
        return 2
    return 0


def write_directory(gguf: Path, target: Path) -> None:
    """Writes config.json, weights in bfloat16 and tokenizer of a GGUF file to a new directory. Raises ModelError."""
    files = GgufFile(gguf)
    config = files.config()
    target.mkdir(parents=True)
    with open_tensors(gguf, parse_model_config(config), torch.device("cpu")) as stored:
        weights = {name: stored.read(name, torch.bfloat16).contiguous() for name in sorted(stored.names)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", _described(config, files))
    (target / "tokenizer.json").write_bytes(files.tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
    _write_json(target / "tokenizer_config.json", settings | files.special_tokens())
    if (template := files.chat_template()) is not None:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _described(config: dict[str, Any], files: GgufFile) -> dict[str, Any]:
    """Adds what other programs than Baton ask of config.json."""
    begin = files.header.metadata.get("tokenizer.ggml.bos_token_id")
    return config | {"model_type": _MODEL_TYPES[config["architectures"][0]], "bos_token_id": begin}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
