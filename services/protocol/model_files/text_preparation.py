"""Changes to texts before a model for embeddings reads them: prompts before them, and lower case.

Prompts are those of config_sentence_transformers.json, by their names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.protocol.model_files.base import ModelError, read_json_object

_FILE = "config_sentence_transformers.json"
# Settings that mean nothing here. Scores of pairs are cosines whatever similarity_fn_name says, as vLLM's are.
_MEAN_NOTHING = frozenset({"__version__", "similarity_fn_name"})


@dataclass(frozen=True, slots=True)
class TextPreparation:
    """The prompts of a model by their names, and the name of that for all texts; None: there is none."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    lower_cases: bool = False

    @property
    def default_prompt(self) -> str:
        """The text that comes before every text, unless another prompt does."""
        return "" if self.default is None else self.prompts[self.default]

    def first_prompt(self, names: Iterable[str]) -> str | None:
        """Returns the first prompt that has one of these lower-case names, however it is written; None: none has."""
        by_name = {name.lower(): prompt for name, prompt in self.prompts.items()}
        return next((by_name[name] for name in names if name in by_name), None)

    def prepared(self, text: str, prompt: str) -> str:
        """Returns a text as the tokenizer gets it."""
        whole = prompt + text
        return whole.lower() if self.lower_cases else whole


UNCHANGED = TextPreparation()


def read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts of the model in a directory, and the name of that for all texts. Raises ModelError."""
    path = directory / _FILE
    values = read_json_object(path) if path.is_file() else {}
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is no object of texts")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r} is none of prompts")
    if values.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise ModelError(f"{path}: model_type {values['model_type']!r} is not supported (SentenceTransformer is)")
    for name, value in values.items():
        if name not in _MEAN_NOTHING | {"prompts", "default_prompt_name", "model_type"} and value is not None:
            raise ModelError(f"{path}: {name} is not supported: nothing reads it (remove it if it means nothing)")
    return prompts, default
