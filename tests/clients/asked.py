"""What all clients ask for: forms that a model of random weights fills within a few tokens."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Which weather has Paris?"}]
MAX_CALL_TOKENS = 128  # more than a call, or an object, ever has
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}


class Weather(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid")  # else the model adds fields of noise

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


TOOL: dict[str, Any] = {
    "name": "Weather",
    "description": "Tells the weather of a city.",
    "parameters": Weather.model_json_schema(),
}
