"""The conversation that a request asks to be continued: its own items, and those that are kept."""

from services.gateway.api.errors import ApiError, invalid
from services.gateway.openai.responses.input_items import ItemReference, of_conversation
from services.gateway.openai.responses.items import MAX_ITEMS, Item, response_with_item
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.request import ResponsesRequest

_NOT_FOUND = 404


class Conversations:
    """Puts conversations together."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    async def of(self, request: ResponsesRequest, tenant: str) -> list[Item]:
        """Returns the items of earlier turns and of this one. Raises ApiError."""
        earlier: list[Item] = []
        if request.previous_response_id is not None:
            earlier = await self._kept.conversation(tenant, request.previous_response_id)
        if len(earlier) + len(request.input) > MAX_ITEMS:
            message = f"Invalid 'input': the conversation must have at most {MAX_ITEMS} items."
            raise invalid(message, "input", "array_above_max_length")
        references = _References(self._kept, tenant)
        items = [await references.item(item.id) if isinstance(item, ItemReference) else item for item in request.input]
        return [*earlier, *of_conversation(items)]


class _References:
    """The items that one request refers to. Each response that has some is read once."""

    def __init__(self, kept: KeptResponses, tenant: str) -> None:
        self._kept = kept
        self._tenant = tenant
        self._outputs: dict[str, dict[str | None, Item]] = {}

    async def item(self, item_id: str) -> Item:
        """Returns an item of the output of some response. Raises ApiError."""
        response_id = response_with_item(item_id)
        if response_id is None:
            raise _not_found(item_id)
        if response_id not in self._outputs:
            self._outputs[response_id] = await self._output(response_id, item_id)
        if (found := self._outputs[response_id].get(item_id)) is None:
            raise _not_found(item_id)
        return found

    async def _output(self, response_id: str, item_id: str) -> dict[str | None, Item]:
        try:
            return {item.id: item for item in await self._kept.output(self._tenant, response_id)}
        except ApiError as error:
            if error.status == _NOT_FOUND:
                raise _not_found(item_id) from error
            raise


def _not_found(item_id: str) -> ApiError:
    words = "Items are found in the responses that are kept here; else send the item itself, as with 'store': false."
    return ApiError(_NOT_FOUND, f"Item with id '{item_id[:200]}' not found. {words}", "input", "item_not_found")
