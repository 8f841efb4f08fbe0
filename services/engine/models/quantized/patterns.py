"""Names of layers in `quantization_config`, as regular expressions that a layer's name begins with."""

import re

from services.engine.models.settings import ConfigSettings

# After a name comes its end or a dot, as in `transformers`: "layers.1" is not the beginning of "layers.11".
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def checked(pattern: str, raw: ConfigSettings, key: str) -> str:
    """Returns a regular expression of this setting. Raises ModelError if it is none."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise raw.refusal(key, f"has a pattern that is no regular expression: {error}") from error
    return pattern


def excluded_modules(raw: ConfigSettings, *keys: str) -> tuple[str, ...]:
    """Returns patterns of the layers that lists of these names exclude, as `transformers` reads them: the beginning of
    a layer's name, a regular expression for it, or its end. Raises ModelError.
    """
    found = dict.fromkeys(name for key in keys for name in raw.texts(key))
    return tuple(checked(rf"(?:{name}){_BOUNDARY}|.*{re.escape(name)}$", raw, keys[0]) for name in found)
