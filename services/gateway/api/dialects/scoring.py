"""Requests for scores of pairs of texts: their fields, and their texts as inputs of embeddings."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SkipValidation

from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest, Input, Truncation
from services.gateway.api.dialects.pair_inputs import pair_input
from services.gateway.api.errors import invalid
from services.gateway.api.requests.schema import Label, Priority, WholeNumber
from services.gateway.api.requests.strict import Nested
from services.protocol.model_files.cross_encoder import PairForm

MAX_TEXTS = 1024  # on either side of the pairs

Text = Annotated[str, Field(min_length=1)]


class TextDocument(Nested):
    """A document as an object, as other servers take it."""

    text: Text


Document = Text | TextDocument
Texts = Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]


@dataclass(frozen=True, slots=True)
class Side:
    """The texts on one side of the pairs. param: the field that they are in; is_list: it is a list."""

    param: str
    texts: Sequence[str]
    is_list: bool

    @classmethod
    def of(cls, param: str, value: Document | list[Document]) -> "Side":
        """Returns the texts of a field."""
        documents = value if isinstance(value, list) else [value]
        texts = [each if isinstance(each, str) else each.text for each in documents]
        return cls(param, texts, isinstance(value, list))

    def name_of(self, index: int) -> str:
        """Returns the path of one of the texts in the request."""
        return f"{self.param}[{index}]" if self.is_list else self.param


class ScoringRequest(Nested):
    """Pairs of texts, of which scores are wanted."""

    model: str | None = None  # None: the one that is served
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None  # whose tokens go; None: right
    cache_salt: Label | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    user: str | None = None  # the client's own note, which asks for nothing
    instruction: Text | None = None  # what makes a document fit, for models whose prompt has one; None: their own
    use_activation: bool | None = None  # False: a cross encoder's number as its head has it; None: yes

    @property
    @abstractmethod
    def sides(self) -> tuple[Side, Side]:
        """The texts on both sides: as many on each, or one on the first."""

    def check_combinations(self) -> None:
        """Checks fields that only make sense together. Raises ApiError."""

    def inputs(self) -> "ScoredTexts":
        """Returns the texts of both sides as inputs of a request for embeddings."""
        first, second = self.sides
        return ScoredTexts(
            input=[*first.texts, *second.texts],
            normalize=True,
            names=[side.name_of(index) for side in (first, second) for index in range(len(side.texts))],
            **{name: getattr(self, name) for name in _PASSED_ON},
        )

    def pairs(self, form: PairForm) -> "ScoredPairs":
        """Returns the pairs as inputs of a request for embeddings, as cross encoders of this form read them."""
        first, second = self.sides
        texts = [*first.texts] * (len(second.texts) if len(first.texts) == 1 else 1)
        return ScoredPairs(
            input="",
            normalize=False,
            texts=[pair_input(form, *pair, self.instruction) for pair in zip(texts, second.texts, strict=True)],
            names=[second.name_of(index) for index in range(len(second.texts))],
            **{name: getattr(self, name) for name in _PASSED_ON},
        )


_PASSED_ON = ("model", "truncate_prompt_tokens", "truncation_side", "cache_salt", "priority", "request_id")


class ScoredTexts(EmbeddingRequest):
    """The texts of a request for scores, of which vectors of length 1 are wanted. names: the fields they come from."""

    names: list[str]

    def param_of(self, index: int) -> str:
        """See EmbeddingRequest."""
        return self.names[index]


class ScoredPairs(ScoredTexts):
    """The pairs of a request for scores, each one input. names: the fields that their second texts come from."""

    texts: SkipValidation[list[Input]]

    def pairs(self) -> list[Input]:
        """See EmbeddingRequest."""
        return self.texts


class RerankRequest(ScoringRequest):
    """A query and documents, as Jina's, Cohere's and vLLM's endpoints take them."""

    query: Document
    documents: Texts
    top_n: Annotated[WholeNumber, Field(ge=0)] | None = None  # results in the answer; 0 and None: all
    return_documents: bool | None = None  # None: yes

    @property
    def sides(self) -> tuple[Side, Side]:
        """See ScoringRequest."""
        return Side.of("query", self.query), Side.of("documents", self.documents)


class ScoreRequest(ScoringRequest):
    """Texts on two sides, under any of the pairs of names that vLLM has for them."""

    text_1: Document | Texts | None = None
    text_2: Document | Texts | None = None
    data_1: Document | Texts | None = None
    data_2: Document | Texts | None = None
    queries: Document | Texts | None = None
    documents: Document | Texts | None = None

    _NAMES: ClassVar = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))

    def check_combinations(self) -> None:
        """Checks that there are two sides, which fit. Raises ApiError."""
        given = [[name for name in pair if getattr(self, name) is not None] for pair in self._NAMES]
        named = [pair for pair in given if pair]
        if not named:
            raise invalid("Missing required parameters: 'text_1' and 'text_2'.", "text_1", "missing_required_parameter")
        if len(named) > 1:
            raise invalid(f"'{named[0][0]}' and '{named[1][0]}' exclude each other.", named[1][0])
        if len(named[0]) == 1:
            (missing,) = {name for pair in self._NAMES if named[0][0] in pair for name in pair} - set(named[0])
            raise invalid(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
        first, second = self.sides
        if len(first.texts) not in (1, len(second.texts)):
            words = f"{len(first.texts)} texts in '{first.param}', but {len(second.texts)} in '{second.param}'"
            raise invalid(f"{words}: as many are needed, or one in '{first.param}'.", second.param, "invalid_value")

    @property
    def sides(self) -> tuple[Side, Side]:
        """See ScoringRequest."""
        first, second = next(pair for pair in self._NAMES if getattr(self, pair[0]) is not None)
        return Side.of(first, getattr(self, first)), Side.of(second, getattr(self, second))
