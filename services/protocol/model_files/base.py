"""The seam between the formats that models come in and everybody who reads them; and what is wrong with a model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Settings = dict[str, Any]  # config.json, or an object in it


class ModelError(Exception):
    """A model that cannot be served. The message is one line that names the file and what is wrong."""


class ModelFiles(Protocol):
    """A model's files, weights aside. Whatever is wrong with them is a ModelError that names the file.

    Every format speaks Hugging Face's words: its values are those that config.json, generation_config.json and
    tokenizer.json would hold.
    """

    path: Path

    def identity(self) -> tuple[bytes, ...]:
        """The bytes that describe the model: models that have the same bytes differ in their weights at most."""

    def config(self) -> Settings:
        """The values of config.json."""

    def generation_config(self) -> Settings:
        """The values of generation_config.json; empty where the model has none."""

    def tokenizer(self) -> bytes:
        """A tokenizer.json, as the `tokenizers` library writes it."""

    def special_tokens(self) -> dict[str, str]:
        """The texts of `bos_token` and the like, for chat templates."""

    def chat_template(self) -> str | None:
        """The Jinja source of the model's own template; None where it has none."""


@contextmanager
def naming(files: ModelFiles) -> Iterator[None]:
    """Makes errors in a model's values name its one file, where they would name config.json and there is none."""
    try:
        yield
    except ModelError as error:
        where, _, rest = str(error).partition(": ")
        if files.path.is_file() and where in ("config.json", "generation_config.json"):
            raise ModelError(f"{files.path.name}: {rest}") from error
        raise


def read_json_object(path: Path) -> Settings:
    """Reads a JSON file with an object in it. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def require_int(values: Settings, key: str, where: str) -> int:
    """A positive integer that must be there. Raises ModelError."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{where}: {key} {found}, a positive integer was expected")
    return value


def require_float(values: Settings, key: str, where: str, default: float | None = None) -> float:
    """A positive number. Missing and null are the default, where there is one. Raises ModelError."""
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{where}: {key} {found}, a positive number was expected")
    return float(value)
