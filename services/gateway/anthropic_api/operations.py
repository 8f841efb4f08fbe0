"""The operation of each route of the Messages API, for /openapi.json."""

from services.gateway.anthropic_api.answer_models import AnswerMessage, MessageEvent, MessagesError, TokenCountAnswer
from services.gateway.anthropic_api.errors import STATUS_OVERLOADED, MessagesEnvelope
from services.gateway.anthropic_api.request import NEUTRAL, CountRequest, MessagesRequest
from services.gateway.http.operation import READING, Operation
from services.gateway.http.rendered import Rendered

_TOKENIZING = (*READING, 404, 429, STATUS_OVERLOADED)

MESSAGES = Operation(
    summary="The assistant's next message in Anthropic's form, whole or as a stream",
    bodies={MessagesRequest: NEUTRAL},
    answer=AnswerMessage,
    error=MessagesError,
    chunk=MessageEvent,
    errors=(*_TOKENIZING, 501, 504),
    id_headers=MessagesEnvelope.id_headers,
)
COUNT_TOKENS = Operation(
    summary="The number of tokens of a prompt",
    bodies={CountRequest: NEUTRAL},
    answer=TokenCountAnswer,
    error=MessagesError,
    errors=_TOKENIZING,
    id_headers=MessagesEnvelope.id_headers,
)
RENDER = Operation(
    summary="A request as token ids and sampling parameters, without an answer",
    bodies={MessagesRequest: NEUTRAL},
    answer=Rendered,
    error=MessagesError,
    errors=_TOKENIZING,
    id_headers=MessagesEnvelope.id_headers,
)
