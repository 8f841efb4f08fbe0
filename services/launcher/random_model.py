"""A small Llama with random weights: something to serve where no trained model is at hand.

Made on first start from a fixed seed, without torch, and kept in a cache directory. It answers noise. The weights are
larger than a trained model's, and embedding and output are not tied: otherwise a random model repeats one token.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from pydoc_data import topics

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_VERSION = 1  # raise it with any change to what is made
_SEED = 20
_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCABULARY = 4, 256, 704, 8, 4, 32, 4096
_MAX_LENGTH = 8192
_END_OF_TEXT, _IM_START, _IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def directory() -> Path:
    """The model's path. Its tokenizer learns from a text of Python's own, so each Python version has one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache / "baton" / f"demo-{_VERSION}-{python}"


def exists(target: Path) -> bool:
    """True when it has been made there."""
    return (target / "config.json").is_file()


def made() -> Path:
    """Makes the model where it is missing, and returns its path."""
    target = directory()
    if not exists(target):
        make(target)
    return target


def make(target: Path) -> None:
    """Writes it, all or nothing: another process sees the whole directory or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(partial)
        _write_json(partial / "generation_config.json", {"eos_token_id": [2, 0], "temperature": 1.0})
        _write_json(partial / "config.json", _config())
        save_file(_weights(), partial / "model.safetensors", metadata={"format": "pt"})
        partial.chmod(0o755)  # mkdtemp's are private
        partial.rename(target)
    except OSError:
        if not exists(target):  # else another process was quicker, and made the same
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": _MAX_LENGTH,
        "mlp_bias": False,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "pad_token_id": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": _VOCABULARY,
    }


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray:
        """float32[rows, columns]; an input of variance 1 gives an output of variance gain squared."""
        scale = np.float32(gain / np.sqrt(columns))
        return random.standard_normal((rows, columns), dtype=np.float32) * scale

    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": random.standard_normal((_VOCABULARY, _HIDDEN), dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(_VOCABULARY, _HIDDEN, 2.0),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM, 2.0),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN, 1.0),
            f"{prefix}.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN, 1.0),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE, 2.0),
        }
    return weights


def _write_tokenizer(target: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_END_OF_TEXT, _IM_START, _IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.topics.values(), trainer)
    assert tokenizer.get_vocab_size() == _VOCABULARY
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": _IM_END,
        "pad_token": _END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _MAX_LENGTH,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(target / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
