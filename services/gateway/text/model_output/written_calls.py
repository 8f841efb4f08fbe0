"""Calls of tools as texts, in the form in which a model writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.text.model_output.formats import CallForm


def write_calls(form: CallForm, calls: Sequence[tuple[str, Any]]) -> str:
    """Returns calls, each by its name and its arguments: an object, or whatever an earlier model wrote."""
    written = (form.before + _body(form, name, arguments) + form.after for name, arguments in calls)
    return form.begin + form.separator.join(written) + form.end


def _body(form: CallForm, name: str, arguments: Any) -> str:
    if form.python or form.tagged:
        named = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        if form.python:
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in named.items())})"
        return f"{name}{form.middle}{''.join(_tag(key, value) for key, value in named.items())}"
    if form.middle:
        return name + form.middle + _json(arguments)
    return f'{{"{form.name}": {_json(name)}, "{form.arguments}": {_json(arguments)}}}'


def _tag(key: str, value: Any) -> str:
    return f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
