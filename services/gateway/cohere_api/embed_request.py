"""Requests of /v2/embed, as typed values, and what they are as requests for embeddings."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from services.gateway.api.dialects.embedding_inputs import MAX_INPUTS, EmbeddingRequest
from services.gateway.api.errors import invalid
from services.gateway.api.requests.schema import Priority, TokenCount
from services.gateway.api.requests.strict import Nested
from services.gateway.api.requests.validation import Neutral
from services.protocol.model_files.text_preparation import TextPreparation

BITS_PER_NUMBER = 8  # of `binary` and `ubinary`

EMBED_NEUTRAL: Neutral = {"images": ([],)}

# The names of prompts in a model's files that an input of each type gets, the first that there is.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


def _only_text(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        words = "contents of type '{kind}' are not supported by this server: models read text."
        raise PydanticCustomError("unsupported", words, {"kind": kind[:64]})
    return value


class TextContent(Nested):
    """A text of an input."""

    type: Literal["text"]
    text: str


class EmbedInput(Nested):
    """One input: its texts, which are joined by line breaks, as the parts of a chat's message are."""

    content: Annotated[
        list[Annotated[TextContent, BeforeValidator(_only_text)]], Field(min_length=1, max_length=MAX_INPUTS)
    ]

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(part.text for part in self.content)


class EmbedRequest(Nested):
    """The body of /v2/embed."""

    model: str | None = None  # None: the one that is served
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None = None
    inputs: Annotated[list[EmbedInput], Field(min_length=1, max_length=MAX_INPUTS)] | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=16)] | None = None  # None: float
    output_dimension: TokenCount | None = None
    truncate: Literal["NONE", "START", "END"] | None = None  # whose tokens go; None: END
    max_tokens: TokenCount | None = None  # that are left of an input; None: as many as the model takes
    priority: Priority | None = None

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""
        if self.texts is None and self.inputs is None:
            raise invalid("Missing required parameter: 'texts', or 'inputs'.", "texts", "missing_required_parameter")
        if self.texts is not None and self.inputs is not None:
            raise invalid("'texts' and 'inputs' exclude each other.", "inputs")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise invalid("'max_tokens' is only allowed where 'truncate' is START or END.", "max_tokens")
        if self.packs_bits and self.output_dimension is not None:
            check_bits(self.output_dimension, "output_dimension")

    @property
    def types(self) -> tuple[EmbeddingType, ...]:
        """The types that vectors are wanted in, each once."""
        return tuple(dict.fromkeys(self.embedding_types or ("float",)))

    @property
    def packs_bits(self) -> bool:
        """True where a type has a bit for each number."""
        return any(name.endswith("binary") for name in self.types)

    @property
    def own_texts(self) -> list[str]:
        """The texts that vectors are made of."""
        return self.texts if self.texts is not None else [each.text for each in self.inputs or ()]

    def prompt(self, texts: TextPreparation) -> str | None:
        """Returns the model's prompt for inputs of this type; None: it has none, or no type is named."""
        return texts.first_prompt(_PROMPTS.get(self.input_type or "", ()))

    def ignored(self, texts: TextPreparation) -> Iterator[str]:
        """Yields the names of fields that nothing acts on; `input_type` is one where the model has no prompt for it."""
        yield from self.unknown_fields()
        if self.input_type is not None and self.prompt(texts) is None:
            yield "input_type"

    @property
    def names(self) -> dict[str, str]:
        """The names of fields here, by those of a request for embeddings."""
        prompt = "texts" if self.inputs is None else "inputs"
        return {"input": prompt, "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}

    def fields(self, texts: TextPreparation) -> dict[str, Any]:
        """The fields of the request for embeddings, as JSON values; absent where this one does not say. texts: of the
        model, which has the prompts.
        """
        fields: dict[str, Any] = {"model": self.model, "dimensions": self.output_dimension, "priority": self.priority}
        fields["own_prompt"] = self.prompt(texts)
        fields["input"] = [*self.own_texts]  # whoever makes tokens of the list empties it
        if self.truncate != "NONE":
            fields["truncate_prompt_tokens"] = -1 if self.max_tokens is None else self.max_tokens
            fields["truncation_side"] = "left" if self.truncate == "START" else "right"
        return {name: value for name, value in fields.items() if value is not None}


class EmbeddedTexts(EmbeddingRequest):
    """The texts of a request of /v2/embed. own_prompt: comes before them; None: that which the model has for all."""

    own_prompt: str | None = None

    def prompt(self, texts: TextPreparation) -> str:
        """See EmbeddingRequest."""
        return super().prompt(texts) if self.own_prompt is None else self.own_prompt


def check_bits(dimensions: int, param: str) -> None:
    """Raises ApiError for vectors whose bits do not fill bytes."""
    if dimensions % BITS_PER_NUMBER:
        words = f"vectors of {dimensions} numbers are no whole bytes: their number must be a multiple of 8."
        raise invalid(f"Invalid '{param}': {words}", param, "invalid_value")
