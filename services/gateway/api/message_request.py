"""The fields of requests whose answer is a message with parts: tools that it may call, and reasoning."""

from abc import ABC
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.gateway.api.hints import Hinting
from services.gateway.api.schema import CommonRequest, whole
from services.gateway.api.tools import NamedChoice, Tool, ToolChoice, Tools, check_tools

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
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the answer may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def one_call(self) -> bool:
        """True when the answer has at most one call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedChoice)

    def check_combinations(self) -> None:
        """See CommonRequest."""
        super().check_combinations()
        check_tools(self.tools or (), self.tool_choice)
