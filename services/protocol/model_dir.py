"""What a Hugging Face model directory says about itself in JSON, weights aside.

Read by the gateway (limits, defaults, EOS ids) and by the engine (the decoder's shape). Needs no torch.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.protocol.sampling import MAX_REPETITION, MIN_REPETITION


class ModelError(Exception):
    """A model directory that cannot be served. The message is one line that names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the model wants to be sampled where a request says nothing. None: the model says nothing either.

    As vLLM does, sampling values of generation_config.json are taken as they are, whatever `do_sample` says.
    """

    eos_token_ids: tuple[int, ...] = ()  # config.json's first, then generation_config.json's further ones
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    not_applied: tuple[str, ...] = ()  # settings of generation_config.json that would matter and are not supported


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway needs to know of a model."""

    vocab_size: int
    max_model_len: int  # positions the model was made for
    generation: GenerationDefaults


def read_model_info(directory: Path) -> ModelInfo:
    """Limits and defaults of the model in `directory`. Raises ModelError."""
    config = read_config(directory)
    return ModelInfo(
        vocab_size=require_int(config, "vocab_size", "config.json"),
        max_model_len=require_int(config, "max_position_embeddings", "config.json"),
        generation=read_generation_defaults(directory, config),
    )


def model_digest(directory: Path) -> str:
    """What tells the model from others: 32 hex digits over config.json and tokenizer.json. Raises ModelError.

    Gateways and workers compare it, so that no gateway sends one model's tokens to another's worker.
    """
    read_config(directory)  # says what is wrong with the directory, if anything is
    digest = blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        path = directory / name
        digest.update(blake2b(path.read_bytes() if path.is_file() else b"").digest())
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as it is. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory} is not a model directory: it has no config.json")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file with an object in it. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def read_generation_defaults(directory: Path, config: dict[str, Any]) -> GenerationDefaults:
    """EOS ids and sampling defaults from config.json (`config`) and, where it is there, generation_config.json."""
    path = directory / "generation_config.json"
    values = read_json_object(path) if path.is_file() else {}
    eos = (*_eos_ids(config, "config.json"), *_eos_ids(values, path.name))
    top_k = _number(values, "top_k", path.name, float.is_integer)
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(eos)),
        temperature=_number(values, "temperature", path.name, lambda value: value >= 0),
        top_p=_number(values, "top_p", path.name, lambda value: 0 < value <= 1),
        top_k=None if top_k is None else (int(top_k) if top_k > 0 else -1),
        min_p=_number(values, "min_p", path.name, lambda value: 0 <= value <= 1),
        repetition_penalty=_number(
            values, "repetition_penalty", path.name, lambda value: MIN_REPETITION <= value <= MAX_REPETITION
        ),
        not_applied=_not_applied(values),
    )


def require_int(values: dict[str, Any], key: str, where: str) -> int:
    """A positive integer that must be there. Raises ModelError."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{where}: {key} {found}, a positive integer was expected")
    return value


def _eos_ids(values: dict[str, Any], where: str) -> list[int]:
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{where}: eos_token_id is {found!r}, an integer or a list of integers was expected")
    return ids


def _number(values: dict[str, Any], key: str, where: str, in_range: Callable[[float], bool]) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{where}: {key} is {value!r}, a number was expected")
    if not in_range(float(value)):
        raise ModelError(f"{where}: {key} is {value!r}, which is out of its range")
    return float(value)


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, [], {}),
}


def _not_applied(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(key for key, neutral in _NEUTRAL.items() if values.get(key) not in neutral)
