"""Small facts that models are asked to put into a form: what is right is known."""

import random
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

_NAMES = ("Mara", "Jonas", "Priya", "Kofi", "Elena", "Tomas", "Aiko", "Samuel", "Ingrid", "Pablo", "Leila", "Viktor")
_CITIES = ("Oslo", "Lisbon", "Nairobi", "Kyoto", "Toronto", "Quito", "Hanoi", "Dublin", "Prague", "Lima")


class Strict(BaseModel):
    """An object with these fields alone, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Person(Strict):
    """A fact to be read from a sentence."""

    name: str
    age: Annotated[int, Field(ge=0, le=150)]
    city: str


class GetWeather(Strict):
    """Arguments of a tool."""

    city: str


class SetAlarm(Strict):
    """Arguments of a tool."""

    hour: Annotated[int, Field(ge=0, le=23)]
    minute: Annotated[int, Field(ge=0, le=59)]


TOOLS: dict[str, type[Strict]] = {"get_weather": GetWeather, "set_alarm": SetAlarm}
_DESCRIBED = {"get_weather": "Tells the weather of a city.", "set_alarm": "Sets an alarm clock."}


@dataclass(frozen=True, slots=True)
class Wish:
    """A request, the tool that it wants, and the tool's right arguments."""

    text: str
    tool: str
    arguments: Strict


def people(count: int) -> list[Person]:
    """Draws people, always the same."""
    draw = random.Random(1)
    return [Person(name=draw.choice(_NAMES), age=draw.randint(18, 90), city=draw.choice(_CITIES)) for _ in range(count)]


def sentence(person: Person) -> str:
    """Tells of a person in words."""
    return f"{person.name} is {person.age} years old and lives in {person.city}."


def wishes(count: int) -> list[Wish]:
    """Draws requests for both tools by turns, always the same."""
    draw = random.Random(2)
    return [_weather(draw) if number % 2 else _alarm(draw) for number in range(count)]


def described_tools() -> list[dict[str, Any]]:
    """Describes the tools as OpenAI's API has them."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": _DESCRIBED[name], "parameters": tool.model_json_schema()},
        }
        for name, tool in TOOLS.items()
    ]


def _weather(draw: random.Random) -> Wish:
    city = draw.choice(_CITIES)
    return Wish(f"What is the weather like in {city}?", "get_weather", GetWeather(city=city))


def _alarm(draw: random.Random) -> Wish:
    hour, minute = draw.randint(10, 23), draw.randint(10, 59)
    return Wish(f"Set an alarm for {hour}:{minute}.", "set_alarm", SetAlarm(hour=hour, minute=minute))
