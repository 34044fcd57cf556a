"""The server of the explorer's page, for a browser on this machine. Needs the packages of the extra `explore`."""

from __future__ import annotations

import asyncio
import socket
import threading
from http import HTTPStatus

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from clipzoo.cli.models.explorer_site import Site
from clipzoo.errors import ConfigError
from clipzoo.report.pages import explorer_page

ADDRESS = "127.0.0.1"
CLIENT_TIMEOUT_SECONDS = 20
"""Longest time to send a request, and longest pause of a client that reads an answer."""
MOST_CONNECTIONS, MOST_REQUEST_BYTES = 512, 16384


def listener(port: int) -> socket.socket:
    """Return a socket that listens on this machine only. port: 0 for a free one. Raises ConfigError if it is in use."""
    try:
        listening = socket.create_server((ADDRESS, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): give another --port, or --port 0") from None
    # Connections inherit it: the kernel ends those whose client stops reading.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CLIENT_TIMEOUT_SECONDS)
    return listening


def server(site: Site) -> uvicorn.Server:
    """Return the server of the page; `run(sockets=[listener(port)])` answers until it is interrupted.

    A connection carries one request, which must arrive within CLIENT_TIMEOUT_SECONDS.
    """

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # uvicorn itself waits for ever for the rest of a request.
            self.loop.call_later(CLIENT_TIMEOUT_SECONDS, self.end_without_request)

        def end_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    return uvicorn.Server(
        uvicorn.Config(
            _application(site), http=Connection, ws="none", lifespan="off", log_level="critical",
            limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=MOST_REQUEST_BYTES,
            timeout_graceful_shutdown=1, headers=[("X-Content-Type-Options", "nosniff"), ("Connection", "close")],
        )
    )  # fmt: skip


def _application(site: Site) -> Starlette:
    page, lock = explorer_page(), threading.Lock()

    # Starlette runs these functions in threads; one computation at a time uses all cores.
    def answer(request: Request) -> Response:
        with lock:
            content = site.answer(f"{request.path_params['name']}?{request.url.query}")
        return JSONResponse(content)

    def picture(request: Request) -> Response:
        with lock:
            content = site.picture(request.url.query)
        return Response(content, media_type="image/jpeg")

    def refusal(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, HTTPStatus.BAD_REQUEST)

    routes = [
        Route("/", lambda request: HTMLResponse(page)), Route("/api/{name}", answer), Route("/picture", picture),
    ]  # fmt: skip
    # A page of another host whose name was made to lead here is refused.
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"])]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={ConfigError: refusal})
