"""The model behind a gateway, as clients name it."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from services.gateway.api.errors import ApiError
from services.protocol.model_files.info import GenerationDefaults


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the one model.

    listed: at least one; the first is the one that answers carry. aliases: patterns of other names, each with the name
    that it stands for, for clients that ask for models of their vendor's.
    """

    listed: Sequence[str]
    aliases: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, listed: str, aliases: Sequence[str] = ()) -> "ModelNames":
        """Reads `name,name` and entries of `pattern=name`."""
        pairs = (alias.rpartition("=") for alias in aliases)
        return cls(listed.split(","), tuple((pattern, name) for pattern, _, name in pairs))

    def find(self, name: str) -> str | None:
        """Returns the listed name that a client's name stands for; None: it is another model's."""
        if name in self.listed:
            return name
        return next((target for pattern, target in self.aliases if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model behind this gateway.

    created: in seconds since 1970. fingerprint: tells answers of another model, or of another version of this program.
    max_logprobs: alternatives of a token that a request may ask for.
    """

    names: ModelNames
    vocab_size: int
    max_logprobs: int
    defaults: GenerationDefaults
    created: int
    fingerprint: str

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names.listed[0]

    def check(self, name: str | None) -> None:
        """Raises ApiError when `name` is another model's; None is this one."""
        if name is not None:
            self.find(name)

    def find(self, name: str) -> str:
        """Returns the listed name that a client's name stands for. Raises ApiError."""
        if (found := self.names.find(name)) is None:
            served = "', '".join(self.names.listed)
            message = f"The model '{name[:200]}' does not exist; this server serves '{served}'."
            raise ApiError(404, message, "model", "model_not_found")
        return found
