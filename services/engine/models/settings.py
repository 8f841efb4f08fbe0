"""Typed values out of a Hugging Face config.json, by an object that remembers which settings were read.

So no setting is accepted and ignored: once a model's config is made, `unread` names what nobody has read and must be
refused, but for the settings of `harmless_settings.py`. A value that is missing or of another type raises a ModelError
that names it.
"""

from collections.abc import Iterator
from typing import Any, Self

from services.engine.models.harmless_settings import is_harmless, is_known_to_matter
from services.protocol.model_files.base import ModelError, Settings, require_float, require_int

_SHOWN_CHARS = 60  # of a value in an error


class ConfigSettings:
    """The settings of config.json, or of one object in it. A setting whose value is null counts as missing."""

    def __init__(self, values: Settings, path: tuple[str, ...] = ()) -> None:
        """path: the names of the objects in config.json that lead to these settings."""
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self._sections: dict[str, Self] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def value(self, key: str, default: Any = None) -> Any:
        """Returns a value of any type, or the default."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer of at least `least`, or the default, if there is one."""
        if self.value(key) is None and default is not None:
            return default
        return require_int(self._values, key, self._where, least)

    def nullable_integer(self, key: str, default: int | None = None) -> int | None:
        """Returns a positive integer, or None for null; the default if the setting is missing."""
        self._read.add(key)
        return default if key not in self._values else None if self.value(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number, or the default, if there is one."""
        self._read.add(key)
        return require_float(self._values, key, self._where, default)

    def is_null(self, key: str) -> bool:
        """Returns True if the setting is there, and null."""
        return key in self._values and self._values[key] is None

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns True or False; the default if the setting is missing. Null is refused: libraries differ in it."""
        self._read.add(key)
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._unexpected(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """Returns a string, or the default."""
        value = self.value(key, default)
        if value is not None and not isinstance(value, str):
            raise self._unexpected(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Returns a list of strings, empty if the setting is missing."""
        value = self.value(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._unexpected(key, value, "a list of strings")
        return value

    def section(self, key: str) -> Self:
        """Returns the settings in an object, none if it is missing. What nobody reads of them is refused too."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self._unexpected(key, value, "an object")
        if key not in self._sections:
            self._sections[key] = type(self)(value, (*self._path, key))
        return self._sections[key]

    def require(self, key: str, only: object) -> None:
        """Raises ModelError if a setting has another value than the one that is supported, which is also the
        default.
        """
        self._read.add(key)
        if self._values.get(key, only) != only:
            raise self.refusal(key, f"is not supported (only {only!r})")

    def disregard(self, *keys: str) -> None:
        """Takes settings as read that mean nothing beside the values of others."""
        self._read.update(keys)

    def unread(self) -> Iterator[ModelError]:
        """Yields the errors of settings, in objects too, that nobody has read and that are not known as harmless."""
        for key, value in self._values.items():
            path = ".".join((*self._path, key))
            if key not in self._read and not is_harmless(path, value):
                unknown = ": nothing reads it (remove it if it means nothing)"
                yield self.refusal(key, f"is not supported{'' if is_known_to_matter(path) else unknown}")
        for section in self._sections.values():
            yield from section.unread()

    def refusal(self, key: str, reason: str) -> ModelError:
        """Returns the error for a setting that cannot be served. reason: goes on after its name and value."""
        return ModelError(f"{self._where}: {key} {_shown(self._values.get(key))} {reason}")

    @property
    def _where(self) -> str:
        return ": ".join(("config.json", *self._path))

    def _unexpected(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self._where}: {key} is {_shown(value)}, {expected} was expected")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
