"""Requests of the Messages API, as typed values."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.anthropic_api.blocks import NAME, Blocks, CacheControl, Texts, known_type
from services.gateway.api.chat import MAX_MESSAGES
from services.gateway.api.errors import invalid
from services.gateway.api.hints import Hinting
from services.gateway.api.schema import Stops, TokenCount
from services.gateway.api.strict import Nested
from services.gateway.api.tools import MAX_TOOLS
from services.gateway.api.validation import Neutral

_NOTHING: tuple[object, ...] = ()
# Fields that Anthropic's API knows and this server does not act on, with the values that ask for nothing.
NEUTRAL: Neutral = {
    "billing_policy": _NOTHING,
    "compaction": _NOTHING,
    "container": _NOTHING,
    "context_management": _NOTHING,
    "diagnostics": _NOTHING,
    "fallback_credit_token": _NOTHING,
    "fallbacks": _NOTHING,
    "inference_geo": _NOTHING,
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": _NOTHING,
}
_ROLES = {
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
    "user": {"text", "tool_result"},
    "system": {"text"},
}


class Message(Nested):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> Self:
        if not self.content and self.role != "assistant":
            raise PydanticCustomError("no_content", "Only an assistant's message may have no content.")
        for block in self.content:
            if block.type not in _ROLES[self.role]:
                words = "A message of role '{role}' has no blocks of type '{kind}'."
                raise PydanticCustomError("block_role", words, {"role": self.role, "kind": block.type})
        return self


class Tool(Nested):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # They ask for what is always so.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Nested):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice_name", "'name' goes with the type 'tool', and with no other.")
        return self


class Thinking(Nested):
    """The reasoning before an answer. display: whether answers show it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenCount | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget_where_it_belongs(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            words = "'budget_tokens' goes with the type 'enabled', and with no other."
            raise PydanticCustomError("thinking_budget", words)
        return self


class OutputFormat(Nested):
    """The form of an answer's text."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Hinting, Nested):
    """The form of an answer, and the effort for it."""

    hints: ClassVar[frozenset[str]] = frozenset({"effort"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Nested):
    """The client's own notes, which ask for nothing."""

    user_id: str | None = None


class CountRequest(Nested):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    model: str | None = None  # None: the one that is served
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: (
        Annotated[list[Annotated[Tool, known_type("tools", "custom")]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where output_config.format was first
    cache_control: CacheControl | None = None

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""
        if self.tool_choice is not None and not self.tools:
            raise invalid("'tool_choice' is only allowed with 'tools'.", "tool_choice")
        if self.form is not None and self.messages[-1].role == "assistant":
            raise invalid("An answer that is begun already cannot be given a form.", "output_config.format")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise invalid("'output_format' and 'output_config.format' exclude each other.", "output_format")
        if any(block.type == "tool_use" for block in self.messages[-1].content):
            raise invalid("The last message has calls of tools, whose results must follow.", "messages")

    @property
    def effort_field(self) -> str:
        """The field that says how much the model reasons."""
        disabled = self.thinking is not None and self.thinking.type == "disabled"
        return "thinking" if disabled else "output_config.effort"

    @property
    def form(self) -> OutputFormat | None:
        """The form of the answer's text; None: any."""
        if self.output_config is not None and self.output_config.format is not None:
            return self.output_config.format
        return self.output_format


class MessagesRequest(Hinting, CountRequest):
    """The body of /v1/messages."""

    hints: ClassVar[frozenset[str]] = frozenset({"service_tier"})

    max_tokens: TokenCount
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def check_combinations(self) -> None:
        """See CountRequest."""
        super().check_combinations()
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise invalid("'thinking.budget_tokens' must be below 'max_tokens'.", "thinking.budget_tokens")

    @property
    def shows_thinking(self) -> bool:
        """False: answers leave the text of the model's reasoning out."""
        return self.thinking is None or self.thinking.display != "omitted"
