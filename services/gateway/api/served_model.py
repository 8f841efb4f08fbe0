"""The model behind a gateway, as clients name it."""

from dataclasses import dataclass

from services.gateway.api.errors import ApiError
from services.protocol.model_files.info import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model behind this gateway.

    created: in seconds since 1970. fingerprint: tells answers of another model, or of another version of this program.
    """

    name: str
    vocab_size: int
    defaults: GenerationDefaults
    created: int
    fingerprint: str

    def check(self, name: str | None) -> None:
        """Raises ApiError when `name` is another model's; None is this one."""
        if name is not None and name != self.name:
            message = f"The model '{name[:200]}' does not exist; this server serves '{self.name}'."
            raise ApiError(404, message, "model", "model_not_found")
