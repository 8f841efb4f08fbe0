"""The base of all request models."""

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 128  # of an object, whether known or not: each unknown one is an error of its own


class Strict(BaseModel):
    """A model that converts nothing and refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "It must have at most {limit} fields.", {"limit": MAX_FIELDS})
        return value
