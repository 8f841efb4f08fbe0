"""Requests of the Messages API, as typed values."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from services.gateway.anthropic_api.blocks import Blocks, TextBlock, Texts, ThinkingBlock, ToolResultBlock, ToolUseBlock
from services.gateway.anthropic_api.other_blocks import OtherBlock
from services.gateway.anthropic_api.tools import Tool, ToolChoice, Tools
from services.gateway.api.errors import invalid, unsupported
from services.gateway.api.requests.chat import MAX_MESSAGES
from services.gateway.api.requests.hints import Hinting
from services.gateway.api.requests.message_request import ReasoningEffort
from services.gateway.api.requests.schema import Stops, TokenCount
from services.gateway.api.requests.strict import Nested
from services.gateway.api.requests.validation import Neutral

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
_READ = {
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "user": (TextBlock, ToolResultBlock),
    "system": (TextBlock,),
}

# Lines at the head of a system prompt that are the client's accounting. They change from request to request, so a
# prompt that began with them would share no prefix with any other.
_ACCOUNTING = re.compile(r"(?:(x-anthropic-[a-z0-9-]+):[^\n]*(?:\n|\Z))+")


class Message(Nested):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks = Field(default_factory=list)

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from (f"content[{number}]" for number, block in enumerate(self.content) if self._read(block) is None)

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks that a turn of its role may have; other text is a text block."""
        return [read for block in self.content if (read := self._read(block)) is not None]

    def _read(self, block: Any) -> Any:
        if isinstance(block, OtherBlock) and self.role != "assistant" and block.text is not None:
            return TextBlock(type="text", text=block.text)
        return block if isinstance(block, _READ[self.role]) else None

    def check(self, path: str) -> None:
        """Raises ApiError where the turn asks for what no model here can do. path: the message's, in the request."""
        for number, block in enumerate(self.content if self.role == "user" else ()):
            if isinstance(block, OtherBlock) and block.asks_to_be_read:
                param = f"{path}.content[{number}]"
                words = f"blocks of type '{block.type[:64]}' are not supported here: models read text."
                raise unsupported(param, f"Invalid '{param}': {words}")


class Thinking(Hinting, Nested):
    """The reasoning before an answer. display: whether answers show it."""

    hints: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: TokenCount | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Nested):
    """The form of an answer's text."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Hinting, Nested):
    """The form of an answer, and the effort for it."""

    hints: ClassVar[frozenset[str]] = frozenset({"effort"})

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(Hinting, Nested):
    """The client's own notes, which ask for nothing."""

    hints: ClassVar[frozenset[str]] = frozenset({"user_id"})

    user_id: str | None = None


class CountRequest(Hinting, Nested):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    hints: ClassVar[frozenset[str]] = frozenset({"thinking"})

    model: str | None = None  # None: the one that is served
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where output_config.format was first
    cache_control: Any = None  # it asks for what is always so, in whatever form

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from super().unknown_fields()
        yield from (f"tools[{number}]" for number, tool in enumerate(self.tools or ()) if not isinstance(tool, Tool))
        if (accounting := self._accounting) is not None:
            yield f"system.{accounting[1]}"

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        if self.tool_choice is not None and self.tool_choice.must_call and not self.own_tools:
            words = "there are no 'tools' to choose from: those that only a vendor's servers run are left out."
            raise invalid(f"Invalid 'tool_choice': {words}", "tool_choice")
        if self.form is not None and self.goes_on:
            raise invalid("An answer that is begun already cannot be given a form.", "output_config.format")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise invalid("'output_format' and 'output_config.format' exclude each other.", "output_format")

    @property
    def own_tools(self) -> Sequence[Tool]:
        """The tools that a model here may call."""
        return [tool for tool in self.tools or () if isinstance(tool, Tool)]

    @property
    def calls_last(self) -> bool:
        """True where the last turn is the assistant's and has calls, whose results do not follow."""
        return any(isinstance(block, ToolUseBlock) for block in self.messages[-1].blocks)

    @property
    def goes_on(self) -> bool:
        """True where the answer goes on the last message."""
        return self.messages[-1].role == "assistant" and not self.calls_last

    @property
    def system_texts(self) -> Sequence[str]:
        """The texts of the system prompt, without the client's accounting."""
        texts = [block.text or "" for block in self.system or ()]
        if (accounting := self._accounting) is not None:
            texts[0] = texts[0][accounting.end() :]
        return [text for text in texts if text]

    @property
    def _accounting(self) -> re.Match[str] | None:
        return _ACCOUNTING.match(self.system[0].text or "") if self.system else None

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


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    hints: ClassVar[frozenset[str]] = CountRequest.hints | {"metadata", "service_tier"}

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
        if self.calls_last:
            raise invalid("The last message has calls of tools, whose results must follow.", "messages")

    @property
    def shows_thinking(self) -> bool:
        """False: answers leave the text of the model's reasoning out."""
        return self.thinking is None or self.thinking.display != "omitted"
