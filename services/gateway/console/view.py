"""The part that a caller may see: everything, or the requests of its own key."""

from dataclasses import dataclass

from services.config import Right
from services.gateway.api.caller import Caller
from services.gateway.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class View:
    """A part of what there is to see. key_id: of the key whose requests are seen; None: everything is."""

    key_id: str | None = None

    @property
    def sees_all(self) -> bool:
        """True where the fleet and all requests are seen."""
        return self.key_id is None


EVERYTHING = View()


def view_of(caller: Caller) -> View:
    """Returns what a caller may see. Raises ApiError, 403, for one that is nobody in particular."""
    if Right.ADMIN in caller.rights:
        return EVERYTHING
    if caller.key_id is None:
        raise ApiError(403, "This key has no requests of its own.", code="insufficient_permissions")
    return View(caller.key_id)
