"""The models that a gateway serves, as clients name them, and what a request's `model` stands for."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from importlib.metadata import version
from typing import Generic, TypeVar

from services.config import Pooling
from services.gateway.api.errors import ApiError
from services.protocol.model_files.cross_encoder import CrossEncoder
from services.protocol.model_files.info import GenerationDefaults, ModelInfo
from services.protocol.model_files.text_preparation import TextPreparation

AnyRequest = TypeVar("AnyRequest", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBase:
    """The model that the workers behind this gateway run.

    created: in seconds since 1970. fingerprint: tells answers of another model, or of another version of this program.
    max_logprobs: alternatives of a token that a request may ask for. pooling, normalizes: of embeddings, where a
    request does not say. generates: False where it makes embeddings alone.
    texts: what becomes of those that become embeddings.
    cross_encoder: None where a pair of texts is scored by their embeddings.
    """

    name: str
    vocab_size: int
    max_logprobs: int
    defaults: GenerationDefaults
    pooling: Pooling
    normalizes: bool
    texts: TextPreparation
    generates: bool
    cross_encoder: CrossEncoder | None
    created: int
    fingerprint: str

    @classmethod
    def of(cls, model: ModelInfo, name: str) -> "ServedBase":
        """Returns a model that is served from now on."""
        return cls(
            name=name,
            vocab_size=model.vocab_size,
            max_logprobs=model.vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, model.vocab_size),
            defaults=model.generation,
            pooling=model.pooling,
            normalizes=model.normalizes,
            texts=model.texts,
            generates=model.generates,
            cross_encoder=model.cross_encoder,
            created=int(time.time()),
            fingerprint=_fingerprint(model.digest or name),
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients may ask for.

    name: the one that answers carry. adapter: the name of what changes the weights of the base; empty: nothing does.
    """

    name: str
    base: ServedBase
    adapter: str = ""

    @property
    def parent(self) -> str | None:
        """The name of the model that an adapter changes; None: no adapter changes one."""
        return self.base.name if self.adapter else None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that clients may ask for, by name.

    by_name: at least one, in the order in which names are listed; the first is for requests that name none. A model may
    have several names. aliases: patterns of other names, each with the name that it stands for, for clients that ask
    for models of their vendor's.
    """

    by_name: Mapping[str, ServedModel]
    aliases: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, model: ModelInfo, names: str, aliases: Sequence[str] = ()) -> "ServedModels":
        """Returns one model under all names of `name,name`, the first of which answers carry.

        aliases: entries of `pattern=name`.
        """
        listed = names.split(",")
        served = ServedModel(listed[0], ServedBase.of(model, listed[0]))
        pairs = (alias.rpartition("=") for alias in aliases)
        return cls(dict.fromkeys(listed, served), tuple((pattern, name) for pattern, _, name in pairs))

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return next(iter(self.by_name.values()))

    def resolve(self, name: str | None) -> ServedModel:
        """Returns the model that a request's `model` stands for. Raises ApiError, 404."""
        return self.default if name is None else self.by_name[self.listed_name(name)]

    def listed_name(self, name: str) -> str:
        """Returns the listed name that a client's name stands for. Raises ApiError, 404."""
        if name in self.by_name:
            return name
        for pattern, listed in self.aliases:
            if fnmatchcase(name, pattern):
                return listed
        served = "', '".join(self.by_name)
        message = f"The model '{name[:200]}' does not exist; this server serves '{served}'."
        raise ApiError(404, message, "model", "model_not_found")


@dataclass(frozen=True, slots=True)
class Resolved(Generic[AnyRequest]):
    """A checked request, and the model that it asks for."""

    request: AnyRequest
    model: ServedModel


def _fingerprint(model: str) -> str:
    served = f"{version('baton-serve')} {model}"
    return f"fp_{blake2b(served.encode(), digest_size=5).hexdigest()}"
