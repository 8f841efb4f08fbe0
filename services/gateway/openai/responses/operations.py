"""The operation of each route of responses, for /openapi.json."""

from services.gateway.http.operation import GENERATING, TOKENIZING, Operation, Schema
from services.gateway.http.rendered import Rendered
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.answer_models import DeletedResponse, InputItemList, Response, ResponseEvent
from services.gateway.openai.responses.pages import DEFAULT_ITEMS, MOST_ITEMS
from services.gateway.openai.responses.request import LOGPROBS, ResponsesRequest

_OF_A_RESPONSE = (400, 404, 431, 500, 503)
_INCLUDE: Schema = {"type": "array", "items": {"type": "string"}, "description": f"Known is {LOGPROBS}."}

RESPONSES = Operation(
    summary="The next items of a conversation, whole or as a stream, kept for later turns",
    bodies={ResponsesRequest: RESPONSES_NEUTRAL},
    answer=Response,
    chunk=ResponseEvent,
    errors=GENERATING,
)
RENDER = Operation(
    summary="A conversation as token ids and sampling parameters, without a response",
    bodies={ResponsesRequest: RESPONSES_NEUTRAL},
    answer=Rendered,
    errors=TOKENIZING,
)
RESPONSE = Operation(
    summary="A response that is running or kept, or of a background response the events",
    query={
        "include": _INCLUDE,
        "stream": {"enum": ["true", "false"]},
        "starting_after": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    },
    answer=Response,
    chunk=ResponseEvent,
    errors=_OF_A_RESPONSE,
)
DELETE_RESPONSE = Operation(summary="A kept response, deleted", answer=DeletedResponse, errors=(404, 431, 500, 503))
CANCEL_RESPONSE = Operation(
    summary="A running response, ended before its time", answer=Response, errors=(*_OF_A_RESPONSE, 504)
)
INPUT_ITEMS = Operation(
    summary="The items that a response answers, earlier turns included",
    query={
        "include": _INCLUDE,
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": DEFAULT_ITEMS},
        "after": {"type": "string", "description": "The id of the item before the first one."},
    },
    answer=InputItemList,
    errors=_OF_A_RESPONSE,
)
