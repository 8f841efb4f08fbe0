"""The paths of the Messages API."""

from starlette.routing import Route

from services.gateway.anthropic_api import operations
from services.gateway.anthropic_api.endpoint import Messages
from services.gateway.anthropic_api.errors import MessagesEnvelope
from services.gateway.api.runners import Runners
from services.gateway.http.limits import Limits
from services.gateway.http.routes import route


def messages_routes(runners: Runners, limits: Limits) -> list[Route]:
    """Returns the routes, for the application to serve."""
    messages, envelope = Messages(runners, limits), MessagesEnvelope()
    return [
        route("/v1/messages", messages.create, operations.MESSAGES, "POST", envelope),
        route("/v1/messages/render", messages.render, operations.RENDER, "POST", envelope),
        route("/v1/messages/count_tokens", messages.count_tokens, operations.COUNT_TOKENS, "POST", envelope),
    ]
