"""The tools that the model of a response is offered, and what they are called: by the model, and by the client.

A model knows no namespaces: it is offered `crm__find` for the tool `find` of the namespace `crm`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api.requests.tools import no_such_tool
from services.gateway.openai.responses.tools import (
    AnyTool,
    CustomTool,
    FunctionTool,
    HostedTool,
    NamespaceTool,
    ToolChoice,
)

_OF_CHAT = re.compile(r"tools\[([0-9]+)\](?:\.(?:function|custom)(?=\.|$))?")


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the name that the model knows."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model is offered. path: of the tool in the request; description: as the model sees it."""

    tool: FunctionTool | CustomTool
    namespace: str | None
    path: str
    description: str | None

    @property
    def name(self) -> str:
        """The name that the model knows."""
        return joined_name(self.namespace, self.tool.name)

    def is_called(self, name: str, namespace: str | None) -> bool:
        """True where a client means this tool by the name. A name without a namespace may be the joined one."""
        if namespace is None and name == self.name:
            return True
        return name == self.tool.name and namespace in (None, self.namespace)


class OfferedTools:
    """All of them, in the order of the chat's tools."""

    def __init__(self, tools: Sequence[OfferedTool] = (), choice: ToolChoice | None = None) -> None:
        """`choice`: which of them the answer may call, and whether it must. Raises ApiError for one of no such tool."""
        self._choice = choice
        if choice is not None and choice.tools is not None:
            tools = [tool for tool in tools if _is_allowed(tool, choice)]
        self._tools = tools
        self._by_name = {tool.name: tool for tool in tools}

    def chat_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat that offer the tools. Raises ApiError."""
        tools = [each.tool.for_chat(each.name, each.description) for each in self._tools]
        return {"tools": tools or None, "tool_choice": self._chat_choice()}

    def _chat_choice(self) -> str | dict[str, Any] | None:
        choice = self._choice
        if choice is None or choice.name is None:
            return None if choice is None else choice.mode or choice.type
        for each in self._tools:
            if each.tool.type == choice.type and each.is_called(choice.name, choice.namespace):
                return {"type": choice.type, choice.type: {"name": each.name}}
        raise no_such_tool(choice.name)

    def called(self, name: str) -> OfferedTool | None:
        """Returns the tool that a model calls; None: it calls one that it was not offered."""
        return self._by_name.get(name)

    def own_path(self, path: str) -> str:
        """Returns the path in the request of what a chat has at `tools[1].function.name`."""
        found = _OF_CHAT.match(path)
        if found is None or int(found[1]) >= len(self._tools):
            return path
        rest = path[found.end() :].replace(".format.grammar", ".format")
        return self._tools[int(found[1])].path + rest


def offered(tools: Sequence[AnyTool], path: str) -> Iterator[OfferedTool]:
    """Yields the tools that the client itself runs. path: of the list."""
    for number, tool in enumerate(tools):
        own_path = f"{path}[{number}]"
        if isinstance(tool, NamespaceTool):
            yield from _of_namespace(tool, own_path)
        elif not isinstance(tool, HostedTool):
            yield OfferedTool(tool, None, own_path, tool.description)


def _of_namespace(namespace: NamespaceTool, path: str) -> Iterator[OfferedTool]:
    about = namespace.description  # which the first one's description ends with
    for number, tool in enumerate(namespace.tools):
        if not isinstance(tool, HostedTool):
            description = tool.description
            if about:
                description = f"{description or ''}\n\nAll tools {namespace.name}__...: {about}".lstrip()
                about = None
            yield OfferedTool(tool, namespace.name, f"{path}.tools[{number}]", description)


def _is_allowed(tool: OfferedTool, choice: ToolChoice) -> bool:
    for each in choice.tools or ():
        if each.type == "namespace" and each.name is not None and each.name == tool.namespace:
            return True
        if each.type == tool.tool.type and each.name is not None and tool.is_called(each.name, each.namespace):
            return True
    return False
