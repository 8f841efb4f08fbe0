"""The operation of each route of Cohere's API, for /openapi.json."""

from services.gateway.cohere_api.answer_models import ChatEvent, CohereChatAnswer, CohereError, EmbedAnswer
from services.gateway.cohere_api.chat_request import CHAT_NEUTRAL, CohereChatRequest
from services.gateway.cohere_api.embed_request import EMBED_NEUTRAL, EmbedRequest
from services.gateway.cohere_api.errors import CohereEnvelope
from services.gateway.http.operation import GENERATING, Operation

CHAT = Operation(
    summary="The assistant's next message in Cohere's form, whole or as a stream",
    bodies={CohereChatRequest: CHAT_NEUTRAL},
    answer=CohereChatAnswer,
    error=CohereError,
    chunk=ChatEvent,
    errors=GENERATING,
    id_headers=CohereEnvelope.id_headers,
)
EMBED = Operation(
    summary="A vector for each text, in one or more of Cohere's types",
    bodies={EmbedRequest: EMBED_NEUTRAL},
    answer=EmbedAnswer,
    error=CohereError,
    errors=GENERATING,
    id_headers=CohereEnvelope.id_headers,
)
