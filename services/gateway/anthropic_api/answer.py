"""A message: its content blocks in JSON values, made of the steps over them, and what stands around them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic_core import from_json

from services.gateway.api.answers.answer_blocks import Act, AnswerBlock, BlockSteps, Kind
from services.gateway.api.answers.choice import Update, Usage

# Clients want thinking to be signed, and send the signature back. It is not checked.
SIGNATURE = "unsigned"

_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)  # of JSON: strings, brackets and commas

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class Head:
    """The id and the model of a message. id: `msg_` and the request's id."""

    id: str
    model: str

    def message(self, content: Sequence[dict[str, Any]], last: Update | None, usage: Usage) -> dict[str, Any]:
        """The message in JSON values. last: the update that ended it; None: it has just begun."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **(ending(last) if last is not None else {"stop_reason": None, "stop_sequence": None}),
            "stop_details": None,
            "usage": usage_json(usage),
        }


def content_of(updates: Sequence[Update], shows_thinking: bool) -> list[dict[str, Any]]:
    """Returns the content blocks of a whole answer, in JSON values."""
    steps = BlockSteps(shows_thinking)
    pieces: list[tuple[AnswerBlock, list[str]]] = []
    for update in updates:
        for step in steps.take(update):
            if step.act is Act.START:
                pieces.append((step.block, []))
            elif step.act is Act.ADD:
                pieces[-1][1].append(step.piece)
    return [block_json(block, "".join(texts)) for block, texts in pieces]


def block_json(block: AnswerBlock, text: str) -> dict[str, Any]:
    """A block in JSON values. text: all of its pieces."""
    match block.kind:
        case Kind.THINKING:
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        case Kind.TEXT:
            return {"type": "text", "text": text}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": as_input(text)}


def as_input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call as the object that clients expect. Of what was cut off, whole fields are left.

    What is no object, which a model may write where no grammar holds it, comes under the name `value`.
    """
    if not arguments.strip():
        return {}
    for text in (arguments, *_whole_fields(arguments)):
        try:
            value = from_json(text)
            orjson.dumps(value)
        except (ValueError, orjson.JSONEncodeError):  # no JSON, or numbers that answers cannot have
            continue
        return value if isinstance(value, dict) else {"value": value}
    return {"value": arguments}


def _whole_fields(arguments: str) -> Iterator[str]:
    """Yields JSON of an object that was cut off: with its last field, if that has an end, and without it."""
    depth, end = 0, 0
    for found in _STRUCTURE.finditer(arguments):
        mark = found[0]
        depth += (mark in "{[") - (mark in "}]")
        if depth == 1 and mark in "{,":
            end = found.start() + (mark == "{")
    if depth > 0 and arguments.lstrip().startswith("{"):
        if arguments.rstrip().endswith(('"', "}", "]")):
            yield arguments + "}"
        yield arguments[:end] + "}"


def ending(last: Update) -> dict[str, str | None]:
    """The fields that say why a message ended. `last` has a finish reason."""
    stopped = last.stop_reason
    if last.finish_reason == "stop" and isinstance(stopped, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
    assert last.finish_reason is not None
    return {"stop_reason": _STOP_REASONS[last.finish_reason], "stop_sequence": None}


def usage_json(usage: Usage) -> dict[str, int]:
    """The usage in Anthropic's form, in which cached tokens are not input tokens.

    Tokens that are cached from now on count as input tokens: a gateway does not know which of them workers keep.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
