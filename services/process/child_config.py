"""The configuration that a process hands to its child, as JSON in the child's environment.

The child's command line has its role, its port, and FLAG. It does not have the configuration: all users of a machine
can read command lines, and the URL of Redis may hold a password.

After an upgrade, `baton restart` of a running `baton up` starts children of the new version: they take the older
version's configuration, with defaults for settings that it does not have.
"""

import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from services.config.option import Refusal

T = TypeVar("T")

FLAG = "--config-from-parent"
_VARIABLE = "BATON_CHILD_CONFIG"


def environment(config: Any) -> dict[str, str]:
    """The variable that a parent adds to a child's environment for the child to have this configuration."""
    return {_VARIABLE: json.dumps(dataclasses.asdict(config), default=str)}


def take(kind: type[T]) -> T:
    """The configuration that this process's parent hands to it. The process's own children do not find it again.

    Raises Refusal where there is none, or where the parent's version has other settings.
    """
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        raise Refusal(f"{FLAG} is for processes that `baton up` starts")
    config: T = read(kind, json.loads(text))
    return config


def read(kind: Any, value: Any) -> Any:
    """The configuration, or the value of a field, that JSON made this value of. Raises Refusal as `take` does."""
    if get_origin(kind) is UnionType:
        inner, _ = get_args(kind)  # an optional field's: its type, and None
        return None if value is None else read(inner, value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if (odd := _odd_setting(kind, value)) is not None:
            raise Refusal(
                f"`baton up` is of another version, which differs in the setting {odd}: end it, and start it again"
            )
        return kind(**{name: read(hints[name], inner) for name, inner in value.items()})
    if get_origin(kind) is tuple:
        return tuple(value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, (Enum, Path)) else value


def _odd_setting(kind: Any, values: dict[str, Any]) -> str | None:
    """A setting that only the parent has, or that this process needs of it; None: there is none."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - fields.keys())
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING is field.default_factory
    ]
    return next(iter([*unknown, *missing]), None)
