"""The server: the page, its routes behind a token, and headers that forbid everything else."""

import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchemo.apps.web.answering import Answering
from torchemo.apps.web.api import Api
from torchemo.apps.web.decoder import Decoder
from torchemo.apps.web.session import Limits, Sessions

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def build_app(
    answering: Answering, *, token: str, limits: Limits | None = None, anywhere: bool = False
) -> Starlette:
    """Build the application.

    Args:
        answering: The run that answers.
        token: First part of every path; without it there is nothing.
        limits: What the page takes at most.
        anywhere: Answer to any host name, not only to those of this machine.
    """
    limits = limits or Limits()
    decoder = Decoder(answering.form)
    sessions = Sessions(limits)
    api = Api(answering, decoder, sessions)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        decoder.close()

    inside = [Mount("/api", routes=api.routes), *_static()]
    middleware = [Middleware(_Headers)]
    if not anywhere:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK)))
    middleware.append(Middleware(_Token, token=token))
    app = Starlette(routes=inside, middleware=middleware, lifespan=lifespan)
    app.state.decoder, app.state.sessions = decoder, sessions
    return app


def serve(
    answering: Answering, listening: socket.socket, *, token: str, anywhere: bool = False
) -> None:
    """Serve the page until it is interrupted."""
    app = build_app(answering, token=token, anywhere=anywhere)
    # The log would show the token; errors still reach the terminal.
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=64,
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[listening])


def _static() -> list[Route]:
    """Return one route for each file of the page: names from the browser never reach the disk."""
    found = {file.name: file.read_bytes() for file in (files(__package__) / "static").iterdir()}
    pages = {f"/{name}": (content, name) for name, content in found.items()}
    pages["/"] = pages.pop("/index.html")
    return [Route(path, _page(*page), methods=["GET"]) for path, page in pages.items()]


def _page(content: bytes, name: str) -> Callable[[Request], Response]:
    kind = KINDS[name[name.rindex(".") :]]

    def page(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return page


class _Headers:
    """Adds the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class _Token:
    """Lets through only what knows the token, and hides it from what comes behind."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given, slash, rest = str(scope["path"]).removeprefix("/").partition("/")
            known = secrets.compare_digest(given.encode(), self.token.encode())
            if not known or not slash:
                await Response("Not found.", 404)(scope, receive, send)
                return
            path = "/" + rest
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self.app(scope, receive, send)
