"""Parts of messages in histories: what is no text becomes a line that says so."""

from typing import Any

# A history never changes, and what a tool gave is not the client's to choose: an image in such a message does not end
# the conversation. In a turn of the user it is refused.
ROLES_READ_AS_TEXT = frozenset({"assistant", "function", "tool"})

_SHOWN_CHARS = 64  # of a part's type
_TEXTS = ("text", "refusal", "thinking", "transcript")


def as_text(part: Any) -> Any:
    """Returns a part as one of text. What is no part stays, and is refused by its field."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind == "text":
        return part
    texts = (part[name] for name in _TEXTS if isinstance(part.get(name), str))
    return {"type": "text", "text": next(texts, f"[{kind[:_SHOWN_CHARS]}: this model reads text alone]")}
