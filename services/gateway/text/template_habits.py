"""The habits of a chat template: the histories that it refuses or cuts. Probes find them when a gateway starts."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from services.gateway.text.call_habits import PLAIN_CALLS, CallHabits, Render, find_call_habits

_WORD, _KEY = "cutoff", "kelvin"  # that no template has
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}


class Arguments(Enum):
    """The forms of a call's arguments that a template takes."""

    ANY = auto()
    OBJECTS = auto()
    TEXTS = auto()


@dataclass(frozen=True, slots=True)
class Habits:
    """The histories that a template refuses, or whose messages it does not all show; with tools, or without them.

    no_system: messages of the system; the next two are then true as well. one_system: two of them in a row.
    system_first: one that is not the first message.
    alternates: turns of the user, or of the assistant, that follow each other. called: those with calls of tools.
    """

    no_system: bool = False
    one_system: bool = False
    system_first: bool = False
    alternates: bool = False
    arguments: Arguments = Arguments.ANY
    called: CallHabits = PLAIN_CALLS


def find_habits(render: Render) -> Habits:
    """Returns the habits of a template."""
    with_tools = [tools for tools in ((), (_TOOL,)) if render([_says("user")], tools) is not None]

    def refuses(*roles: str) -> bool:
        messages = [_says(role, number) for number, role in enumerate(roles)]
        texts = [render(messages, tools) for tools in with_tools]
        return any(text is None or any(each["content"] not in text for each in messages) for text in texts)

    no_system = refuses("system", "user")
    alternates = refuses("user", "user") or refuses("user", "assistant", "assistant", "user")
    arguments = _arguments(render)
    return Habits(
        no_system=no_system,
        one_system=no_system or refuses("system", "system", "user"),
        system_first=no_system or refuses("system", "user", "assistant", "system", "user"),
        alternates=alternates,
        arguments=arguments,
        called=find_call_habits(render, texts=arguments is Arguments.TEXTS, alternates=alternates),
    )


def _says(role: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"utterance{number}", **more}


def _arguments(render: Render) -> Arguments:
    def shows(arguments: object, *words: str) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        answer = {**_says("assistant", tool_calls=[call]), "content": ""}  # some show a text or the calls
        result = _says("tool", tool_call_id="abcdefghi", name="probe")
        text = render((_says("user"), answer, result), (_TOOL,))
        return text is not None and all(word in text for word in words)

    takes_objects, takes_texts = shows({_KEY: _WORD}, _KEY, _WORD), shows(_WORD, _WORD)
    if takes_objects and takes_texts and shows({_KEY: _WORD}, f"'{_KEY}'"):  # as Python writes it, which is no JSON
        return Arguments.TEXTS
    if takes_objects == takes_texts:
        return Arguments.ANY
    return Arguments.OBJECTS if takes_objects else Arguments.TEXTS
