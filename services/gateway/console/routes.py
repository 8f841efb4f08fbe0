"""The routes of the console: at the admin port always, at the API's port where that asks for keys."""

from dataclasses import dataclass

from starlette.routing import Route

from services.config import Right
from services.gateway.api.caller import Authenticator
from services.gateway.console import operations
from services.gateway.console.feed import Feed
from services.gateway.console.pages import ConsolePages, Files
from services.gateway.console.sources import Sources
from services.gateway.http.routes import NO_PAGES, SAME_ORIGIN, Pages, route

BEGINNING = "/console/"


@dataclass(frozen=True, slots=True)
class Console:
    """The pages of both ports, and the feed, which is to be run."""

    at_api: Pages
    at_admin: Pages
    feed: Feed


def make_console(sources: Sources, keys: Authenticator | None, *, admin_has_successor: bool = False) -> Console:
    """Returns the console of a gateway. keys: None asks for none, and leaves the API's port without a console.

    admin_has_successor: the admin port's server stops when the gateway drains, as another gateway takes its place.
    """
    feed, files = Feed(sources), Files()
    admin = ConsolePages(
        sources,
        feed,
        has_plotly=files.has_plotly,
        api=SAME_ORIGIN.removeprefix(BEGINNING) + "/v1",
        leaves_early=admin_has_successor,
        keys=keys,
        right=Right.ADMIN,
    )
    at_admin = Pages(_routes(admin, files), files.paths)
    if keys is None:
        return Console(NO_PAGES, at_admin, feed)
    api = ConsolePages(sources, feed, has_plotly=files.has_plotly, api="../v1", leaves_early=True, keys=keys)
    return Console(Pages(_routes(api, files), files.paths, BEGINNING), at_admin, feed)


def _routes(pages: ConsolePages, files: Files) -> list[Route]:
    return [
        route("/console", files.redirect, operations.PAGE),
        route("/console/", files.index, operations.PAGE),
        route("/console/about", pages.about, operations.ABOUT),
        route("/console/feed", pages.listen, operations.FEED),
        route("/console/requests/{request_id:path}", pages.request, operations.REQUEST),
        route("/console/{file:path}", files.file, operations.FILE),
    ]
