"""Parts of messages. In histories, what is no text becomes a line that says so, and a thought is the reasoning."""

from typing import Any, Literal

from services.gateway.api.requests.strict import Open

# A history never changes, and what a tool gave is not the client's to choose: an image in such a message does not end
# the conversation. In a turn of the user it is refused.
ROLES_READ_AS_TEXT = frozenset({"assistant", "function", "tool"})

_SHOWN_CHARS = 64  # of a part's type
_TEXTS = ("text", "refusal", "transcript")
_THINKING = "thinking"


class ContentPart(Open):
    """A part of a message; only text is supported. A text that is null is an empty one."""

    type: Literal["text"]
    text: str | None


class ThinkingPart(ContentPart):
    """A part of an earlier answer that is reasoning."""


def as_text(part: Any) -> Any:
    """Returns a part as one of text. What is no part stays, and is refused by its field."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind == "text":
        return part
    texts = (part[name] for name in _TEXTS if isinstance(part.get(name), str))
    return {"type": "text", "text": next(texts, f"[{kind[:_SHOWN_CHARS]}: this model reads text alone]")}


def as_answers(part: Any) -> Any:
    """Returns a part of an earlier answer as one of text, or of reasoning."""
    if not isinstance(part, dict) or part.get("type") != _THINKING:
        return as_text(part)
    inner = part.get(_THINKING)
    listed = inner if isinstance(inner, list) else [{"text": inner}]  # Mistral's clients send a list
    texts = [each.get("text") for each in listed if isinstance(each, dict)]
    return ThinkingPart(type="text", text="\n".join(text for text in texts if isinstance(text, str)))
