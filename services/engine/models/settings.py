"""Typed values out of a Hugging Face config.json. A value that is missing or of another type raises a ModelError that
names it.
"""

from services.protocol.model_files.base import ModelError, Settings, require_float, require_int


def read_int(values: Settings, key: str, default: int | None = None) -> int:
    """Returns a positive integer. For a missing or null value it returns the default, if there is one."""
    if values.get(key) is None and default is not None:
        return default
    return require_int(values, key, "config.json")


def read_float(values: Settings, key: str, default: float | None = None) -> float:
    """Returns a positive number. For a missing or null value it returns the default, if there is one."""
    return require_float(values, key, "config.json", default)


def read_bool(values: Settings, key: str, default: bool = False) -> bool:
    """Returns True or False; the default if the value is missing."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {value!r}, true or false was expected")
    return value


def require_value(values: Settings, key: str, only: object) -> None:
    """Raises ModelError if a setting has another value than the one that is supported, which is also the default."""
    if (value := values.get(key, only)) != only:
        raise ModelError(f"config.json: {key} {value!r} is not supported (only {only!r})")
