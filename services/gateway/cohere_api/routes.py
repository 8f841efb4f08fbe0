"""The paths of Cohere's API."""

from starlette.routing import Route

from services.gateway.api.runners import Runners
from services.gateway.cohere_api import operations
from services.gateway.cohere_api.chat_endpoint import CohereChats
from services.gateway.cohere_api.embed_endpoint import CohereEmbeddings
from services.gateway.cohere_api.errors import CohereEnvelope
from services.gateway.http.limits import Limits
from services.gateway.http.routes import route


def cohere_routes(runners: Runners, limits: Limits) -> list[Route]:
    """Returns the routes, for the application to serve."""
    envelope = CohereEnvelope()
    return [
        route("/v2/chat", CohereChats(runners, limits), operations.CHAT, "POST", envelope),
        route("/v2/embed", CohereEmbeddings(runners, limits), operations.EMBED, "POST", envelope),
    ]
