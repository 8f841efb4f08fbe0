"""The paths of responses."""

from starlette.routing import Route

from services.gateway.api.request_runner import READING_GRACE_S
from services.gateway.api.runners import Runners
from services.gateway.http.limits import Limits
from services.gateway.http.routes import route
from services.gateway.openai.responses import operations
from services.gateway.openai.responses.background_kept import BackgroundResponses
from services.gateway.openai.responses.endpoint import ResponsesEndpoint
from services.gateway.openai.responses.held import HeldAnswers
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.pages import ResponsePages
from services.gateway.openai.responses.running import RunningResponses
from services.gateway.openai.responses.store import ResponseStore


def response_routes(runners: Runners, limits: Limits, store: ResponseStore | None) -> list[Route]:
    """Returns the routes, for the application to serve. store: None keeps no responses."""
    held, running = HeldAnswers(), RunningResponses()
    kept = KeptResponses(store, runners.side, held)
    background = None if store is None else BackgroundResponses(store, runners.side, held)
    create = ResponsesEndpoint(runners, limits, kept, background, running)
    pages = ResponsePages(kept, running, limits.request_timeout_s + READING_GRACE_S, limits.strict_fields)
    return [
        route("/v1/responses", create, operations.RESPONSES, "POST"),
        route("/v1/responses/render", create.render, operations.RENDER, "POST"),
        route("/v1/responses/{response_id}", pages.retrieve, operations.RESPONSE),
        route("/v1/responses/{response_id}", pages.delete, operations.DELETE_RESPONSE, "DELETE"),
        route("/v1/responses/{response_id}/cancel", pages.cancel, operations.CANCEL_RESPONSE, "POST"),
        route("/v1/responses/{response_id}/input_items", pages.input_items, operations.INPUT_ITEMS),
    ]
