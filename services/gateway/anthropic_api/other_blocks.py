"""Content blocks that no model here reads as they are: their text, where they have one."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.gateway.api.requests.strict import Open

# Of a turn of the user: with them a client tells its vendor's server something, and asks for nothing.
_NOTES = frozenset({"browser_state", "compaction", "container_upload", "tool_addition", "tool_removal"})


class OtherBlock(Open):
    """A block of any other type: media, or what a vendor's server wrote. Whoever holds it names it."""

    type: str

    def unknown_fields(self) -> Iterator[str]:
        """See Open. The whole of a block is left out, or none of it."""
        return iter(())

    @property
    def text(self) -> str | None:
        """The text of a document, of a search result, or of a tool's name; None: the block has none."""
        fields = self.model_extra or {}
        match self.type:
            case "document":
                texts = _text_of_source(fields.get("source"))
                heads = [fields.get("title"), fields.get("context")]
            case "search_result":
                texts = _text_of(fields.get("content"))
                heads = [fields.get("title"), fields.get("source")]
            case "tool_reference":
                texts, heads = fields.get("tool_name"), []
            case _:
                return None
        if not isinstance(texts, str):
            return None
        return "\n".join([*(head for head in heads if isinstance(head, str)), texts])

    @property
    def asks_to_be_read(self) -> bool:
        """True where a user's turn with this block asks for an answer to more than a text: an image, or a sound."""
        of_a_server = self.type in _NOTES or self.type.endswith(("_tool_result", "_tool_use", "_thinking"))
        return self.text is None and not of_a_server

    @property
    def placeholder(self) -> str:
        """The line that stands where the block was, for the model to know of it."""
        source = (self.model_extra or {}).get("source")
        kind = source.get("media_type") if isinstance(source, Mapping) else None
        named = f"{self.type}, {kind}" if isinstance(kind, str) else self.type
        return f"[{named[:128]}: left out, since this model reads text only]"


def _text_of_source(source: Any) -> str | None:
    if not isinstance(source, Mapping):
        return None
    match source.get("type"):
        case "text":
            return data if isinstance(data := source.get("data"), str) else None
        case "content":
            return _text_of(source.get("content"))
        case _:
            return None


def _text_of(content: Any) -> str | None:
    """Returns the text of a string or of a list of text blocks; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [text for block in content if isinstance(block, Mapping) and isinstance(text := block.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(content) else None
