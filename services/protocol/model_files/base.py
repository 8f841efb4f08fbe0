"""The seam between the formats of models and all code that reads them; and the error for a model that
cannot be served.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Settings = dict[str, Any]  # the values of config.json, or of an object in it


class ModelError(Exception):
    """A model that cannot be served. The message is one line that names the file and what is wrong."""


class ModelFiles(Protocol):
    """A model's files, weights aside. Any defect of them raises a ModelError that names the file.

    Every format is read as Hugging Face's: values are those that config.json, generation_config.json and tokenizer.json
    would hold.
    """

    path: Path

    def identity(self) -> tuple[bytes, ...]:
        """Returns the bytes that describe the model: models with the same bytes differ at most in their weights."""

    def config(self) -> Settings:
        """Returns the values of config.json."""

    def generation_config(self) -> Settings:
        """Returns the values of generation_config.json; empty if the model has none."""

    def tokenizer(self) -> bytes:
        """Returns a tokenizer.json, as the `tokenizers` library writes it."""

    def tokenizer_config(self) -> Settings:
        """Returns the values of tokenizer_config.json; empty if the model has none."""

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts of `bos_token` and the like, for chat templates."""

    def chat_template(self) -> str | None:
        """Returns the Jinja source of the model's own template; None if it has none."""

    def tool_template(self) -> str | None:
        """Returns the source of the template named `tool_use`, for chats with tools; None: there is only the one."""

    def response_template(self) -> object | None:
        """Returns the `response_template`, which says how the model's answers are read; None if it has none."""


@contextmanager
def naming(files: ModelFiles) -> Iterator[None]:
    """Makes errors in a model's values name its one file instead of a config.json that does not exist."""
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


def require_int(values: Settings, key: str, where: str, least: int = 1) -> int:
    """Returns an integer of at least `least`, which must be there. Raises ModelError."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if value is None else f"is {value!r}"
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ModelError(f"{where}: {key} {found}, {expected} was expected")
    return value


def require_float(values: Settings, key: str, where: str, default: float | None = None) -> float:
    """Returns a positive number. For a missing or null value it returns the default, if there is one. Raises
    ModelError.
    """
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{where}: {key} {found}, a positive number was expected")
    return float(value)
