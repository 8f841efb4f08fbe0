"""A prefix of all paths, for gateways behind a proxy that routes by it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Serves the paths of an application below a prefix too: a proxy may strip the prefix, or keep it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """prefix: as /models/chat."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            rest = scope["path"].removeprefix(self._prefix)
            if rest != scope["path"] and rest[:1] in ("", "/"):
                scope = {**scope, "path": rest or "/"}
        await self._app(scope, receive, send)
