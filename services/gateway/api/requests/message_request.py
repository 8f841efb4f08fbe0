"""The fields of requests whose answer is a message with parts: tools that it may call, and reasoning."""

from abc import ABC
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.schema import CommonRequest, whole
from services.gateway.api.requests.tools import (
    HostedTool,
    NamedChoice,
    Tool,
    ToolChoice,
    Tools,
    check_tools,
    unknown_fields,
)

_MAX_BUDGET = 1 << 20

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, Field(ge=0, le=_MAX_BUDGET), whole]


class MessageRequest(Hinting, CommonRequest, ABC):
    """A request whose answer is a message."""

    hints: ClassVar[frozenset[str]] = frozenset({"reasoning_effort"})

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingBudget | None = None  # in tokens
    include_reasoning: bool | None = None

    @property
    def own_tools(self) -> Sequence[Tool]:
        """The tools that the client itself runs."""
        return [tool for tool in self.tools or () if not isinstance(tool, HostedTool)]

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the answer may call."""
        return () if self.tool_choice == "none" else self.own_tools

    @property
    def one_call(self) -> bool:
        """True when the answer has at most one call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedChoice)

    def check_combinations(self) -> None:
        """See CommonRequest."""
        super().check_combinations()
        check_tools(self.own_tools, self.tool_choice)

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from unknown_fields(self.tools or ())
