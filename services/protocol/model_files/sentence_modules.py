"""The way in which a model for embeddings makes one vector of its tokens', by the files of sentence-transformers.

modules.json lists the modules one after the other (Reimers and Gurevych 2019, arXiv 1908.10084): the transformer, then
the pooling, whose folder has a config.json, then maybe what gives vectors the length 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import Pooling
from services.protocol.model_files.base import ModelError, Settings, read_json_object

MODULES_FILE = "modules.json"

_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_NAMED_MODES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}  # in newer files


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules after the transformer. normalizes: vectors get the length 1."""

    pooling: Pooling
    normalizes: bool


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """Returns the modules of the model in a directory; None: its files do not say. Raises ModelError for modules that
    are not supported.
    """
    path = directory / MODULES_FILE
    if not path.is_file():
        return None
    modules = {str(module.get("type", "")).rpartition(".")[2]: module for module in _listed(path)}
    for kind in modules:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(f"{path}: the module {kind or 'without a type'} is not supported")
    if "Pooling" not in modules:
        raise ModelError(f"{path} has no module for pooling")
    pooling = directory / str(modules["Pooling"].get("path", "")) / "config.json"
    return SentenceModules(_pooling_of(read_json_object(pooling), pooling), "Normalize" in modules)


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelError(f"{path} does not hold a list of objects")
    return values


def _pooling_of(values: Settings, path: Path) -> Pooling:
    named = values.get("pooling_mode")
    asked = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    chosen = {_MODES.get(name) for name in asked} | ({_NAMED_MODES.get(str(named))} if named is not None else set())
    (only, *others) = chosen or {None}
    if only is None or others:
        words = ", ".join([*asked, *([f"pooling_mode {named}"] if named is not None else [])]) or "none"
        raise ModelError(f"{path}: pooling by {words} is not supported (one of {', '.join(Pooling)} is)")
    return only
