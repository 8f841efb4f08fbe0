"""The interface of dialects: how the prompts of one kind of request are made."""

from collections.abc import Iterator
from typing import Protocol

from services.gateway.api.answers.choice import PromptShown
from services.gateway.api.dialects.prompts import Prompt
from services.gateway.api.requests.schema import Request


class Dialect(Protocol[Request]):
    """One kind of request. Fields that kinds have in different forms are read by methods of `kind`."""

    kind: type[Request]

    async def prompts(self, request: Request, max_tokens: int, tenant: str) -> list[Prompt]:
        """Returns the request's prompts, at least one. Raises ApiError, also for a text longer than `max_tokens`.

        tenant: whose request it is, where it has to wait beside others.
        """

    def ignored_fields(self, request: Request) -> Iterator[str]:
        """Yields the paths of the request's fields that nothing acts on, with this model."""

    def shown(self, request: Request, prompt: Prompt) -> PromptShown | None:
        """The part of a prompt that its answers show; None: nothing."""

    def constrains(self, request: Request) -> bool:
        """True when answers to the request follow a grammar."""

    def grammar(self, request: Request, prompt: Prompt) -> tuple[str, str]:
        """Returns the grammar of the answers, and the field that it comes from. Not for the event loop.

        Raises ApiError.
        """
