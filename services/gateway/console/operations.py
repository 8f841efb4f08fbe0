"""The operation of each route of the console, for the table of the admin port's pages."""

from pydantic import BaseModel, ConfigDict

from services.gateway.http.operation import Operation


class ConsoleAnswer(BaseModel):
    """An object whose fields the README of this folder lists."""

    model_config = ConfigDict(extra="allow")


_NOT_FOUND = (404, 431, 500)

PAGE = Operation(summary="The console, a page for people who run the gateway", media_type="text/html")
FILE = Operation(summary="A file of that page", media_type="application/octet-stream", errors=_NOT_FOUND)
ABOUT = Operation(summary="The gateway, and what the caller may see of it", answer=ConsoleAnswer)
FEED = Operation(
    summary="The fleet, requests and figures, as events", media_type="text/event-stream", errors=(431, 500, 503)
)
REQUEST = Operation(summary="All that is known of one recent request", answer=ConsoleAnswer, errors=_NOT_FOUND)
