"""The way in which a model for embeddings makes one vector of a text, by the files of sentence-transformers.

modules.json lists the modules one after the other (Reimers and Gurevych 2019, arXiv 1908.10084): the transformer, whose
settings are in sentence_bert_config.json; then the pooling, whose folder has a config.json; then maybe what gives
vectors the length 1. config_sentence_transformers.json has prompts. A setting of these files that nobody reads is
refused by name, unless it is known to mean nothing here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import Pooling
from services.protocol.model_files.base import ModelError, Settings, read_json_object, require_int
from services.protocol.model_files.text_preparation import TextPreparation, read_prompts

MODULES_FILE = "modules.json"

_LIBRARY = "sentence_transformers."  # modules of other programs may have the same names
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_NAMED_MODES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}  # in newer files
_SIZES = frozenset({"word_embedding_dimension", "embedding_dimension"})  # of the pooling, as config.json has it
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Settings of the transformer's that say how the library calls it: hidden states of all tokens are what is pooled.
_CALLS = frozenset({"transformer_task", "modality_config", "module_output_name", "unpad_inputs"})


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules of a model. normalizes: vectors get the length 1. max_tokens: of the longest text; None: as many as
    the model has positions.
    """

    pooling: Pooling
    normalizes: bool
    texts: TextPreparation
    max_tokens: int | None


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """Returns the modules of the model in a directory; None: its files do not say. Raises ModelError for modules and
    settings that are not supported.
    """
    path = directory / MODULES_FILE
    if not path.is_file():
        return None
    modules = {_kind_of(module, path): str(module.get("path", "")) for module in _listed(path)}
    if "Pooling" not in modules:
        raise ModelError(f"{path} has no module for pooling")
    if modules.get("Transformer"):
        raise ModelError(f"{path}: a transformer in the folder {modules['Transformer']} is not supported")
    max_tokens, lower_cases = _transformer_settings(directory)
    prompts, default = read_prompts(directory)
    pooling = directory / modules["Pooling"] / "config.json"
    return SentenceModules(
        pooling=_pooling_of(read_json_object(pooling), pooling, has_prompts=any(prompts.values())),
        normalizes="Normalize" in modules,
        texts=TextPreparation(prompts, default, lower_cases),
        max_tokens=max_tokens,
    )


def _kind_of(module: dict[str, Any], path: Path) -> str:
    name = str(module.get("type", ""))
    kind = name.rpartition(".")[2]
    if not name.startswith(_LIBRARY) or kind not in ("Transformer", "Pooling", "Normalize"):
        shown = kind if name.startswith(_LIBRARY) else name
        raise ModelError(f"{path}: the module {shown or 'without a type'} is not supported")
    return kind


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelError(f"{path} does not hold a list of objects")
    return values


def _transformer_settings(directory: Path) -> tuple[int | None, bool]:
    """Returns the tokens of the longest text, and whether texts become lower case."""
    path = next((directory / name for name in _TRANSFORMER_FILES if (directory / name).is_file()), None)
    if path is None:
        return None, False
    values = read_json_object(path)
    for name, value in values.items():
        if name not in _CALLS | {"max_seq_length", "do_lower_case"} and value not in (None, {}):
            raise ModelError(f"{path}: {name} is not supported: nothing reads it (remove it if it means nothing)")
    lower_cases = values.get("do_lower_case") or False
    if not isinstance(lower_cases, bool):
        raise ModelError(f"{path}: do_lower_case is {lower_cases!r}, true or false was expected")
    longest = None if values.get("max_seq_length") is None else require_int(values, "max_seq_length", str(path))
    return longest, lower_cases


def _pooling_of(values: Settings, path: Path, *, has_prompts: bool) -> Pooling:
    named = values.get("pooling_mode")
    asked = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    chosen = {_MODES.get(name) for name in asked} | ({_NAMED_MODES.get(str(named))} if named is not None else set())
    (only, *others) = chosen or {None}
    if only is None or others:
        words = ", ".join([*asked, *([f"pooling_mode {named}"] if named is not None else [])]) or "none"
        raise ModelError(f"{path}: pooling by {words} is not supported (one of {', '.join(Pooling)} is)")
    if has_prompts and values.get("include_prompt", True) is not True:
        raise ModelError(
            f"{path}: include_prompt {values['include_prompt']!r} is not supported: prompts are pooled too"
        )
    for name in values:
        if name not in _SIZES | {"pooling_mode", "include_prompt"} and not name.startswith("pooling_mode_"):
            raise ModelError(f"{path}: {name} is not supported: nothing reads it (remove it if it means nothing)")
    return only
