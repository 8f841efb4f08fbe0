"""The bases of all request models."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 128  # of an object, whether known or not: each unknown one is an error of its own


class Strict(BaseModel):
    """A model that converts nothing and refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_extra={"maxProperties": MAX_FIELDS})

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "It must have at most {limit} fields.", {"limit": MAX_FIELDS})
        return value


class Open(Strict):
    """A model that keeps fields which it does not know, for them to be named."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def unknown_fields(self) -> Iterator[str]:
        """Yields the paths of fields that nothing acts on, in an answer's words: `messages[0].cache_control`."""
        yield from self.model_extra or ()


class Nested(Open):
    """A model that names the unknown fields of the models inside it, too."""

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Open):
                yield from (f"{name}.{field}" for field in value.unknown_fields())
            elif isinstance(value, list):
                for number, entry in enumerate(value):
                    if isinstance(entry, Open):
                        yield from (f"{name}[{number}].{field}" for field in entry.unknown_fields())
