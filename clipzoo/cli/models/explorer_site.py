"""The explorer's page with its answers: served to a browser on this machine, or written to one file.

The server needs the packages of the extra `explore`.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

from clipzoo.api.explore import Explorer
from clipzoo.errors import ConfigError
from clipzoo.io.weights import checkpoints_in, mark_of, step_of
from clipzoo.report.figures import FIRST, Curve, evaluation_curves, training_curves
from clipzoo.report.pages import explorer_page
from clipzoo.runs.directory import is_finished
from clipzoo.runs.record import TrainingLog

if TYPE_CHECKING:
    import uvicorn

ADDRESS = "127.0.0.1"
CLIENT_TIMEOUT_SECONDS = 20
"""Longest time to send a request, and longest pause of a client that reads an answer."""
MOST_CONNECTIONS, MOST_REQUEST_BYTES = 512, 16384
MATCHES, NEIGHBOURS, EXPLAINED = 12, 8, 4
"""Pictures by caption and by picture, and best pictures per caption whose parts an export has."""
CHOICES = 1000
MOST_LETTERS, MOST_VALUES = 500, 400
"""Letters of a caption, and values of a curve."""


@dataclass(frozen=True)
class ExploredRun:
    """A run of the page. folder: None for a model without a run. step: of the checkpoint that is explored.

    loss_unit: unit of the training's loss, empty if it has none.
    """

    name: str
    folder: Path | None
    step: int | None
    loss_unit: str = ""


class Site:
    """Answers to the paths that the page asks for."""

    def __init__(self, explorer: Explorer, runs: Sequence[ExploredRun]) -> None:
        self.explorer, self.runs = explorer, runs

    def answer(self, path: str) -> Any:
        """Return the answer to a path, such as "search?collection=0&caption=a%20circle".

        Raises:
            ConfigError: the path asks for nothing that the page shows.
        """
        name, _, text = path.partition("?")
        query = dict(parse_qsl(text, keep_blank_values=True))
        if name == "overview":
            return {"runs": [run.name for run in self.runs], "collections": self.explorer.overview(CHOICES)}
        if name == "curves":
            return [_curves(run) for run in self.runs]
        collection = _number(query, "collection", len(self.explorer.collections))
        if name == "maps":
            return self.explorer.maps(collection)
        if name == "search":
            return self.explorer.search(collection, _caption(query), MATCHES)
        row = _number(query, "row", len(self.explorer.collections[collection]))
        if name == "picture":
            return self.explorer.picture(collection, row, NEIGHBOURS)
        if name == "parts":
            return self.explorer.parts(collection, row, _caption(query))
        raise ConfigError(f"there is no answer to {name!r}")

    def picture(self, text: str) -> bytes:
        """Return the JPEG of a query such as "collection=0&row=5"."""
        query = dict(parse_qsl(text))
        collection = _number(query, "collection", len(self.explorer.collections))
        return self.explorer.jpeg(collection, _number(query, "row", len(self.explorer.collections[collection])))

    def static(self, captions: int) -> str:
        """Return the page with the answers for the first `captions` captions of each collection."""
        answers: dict[str, Any] = {"curves": self.answer("curves")}
        pictures: dict[str, str] = {}
        overview = {**self.answer("overview"), "collections": self.explorer.overview(captions)}
        for number, collection in enumerate(overview["collections"]):
            answers |= self._answers(number, collection["choices"])
            rows = {match["row"] for match in _matches(answers, f"collection={number}&")}
            for row in sorted(rows):
                jpeg = base64.b64encode(self.explorer.jpeg(number, row)).decode()
                pictures[f"{number}/{row}"] = f"data:image/jpeg;base64,{jpeg}"
        return explorer_page({"answers": {"overview": overview, **answers}, "pictures": pictures})

    def _answers(self, number: int, captions: Sequence[str]) -> dict[str, Any]:
        """Answers for one collection by path."""
        place = f"collection={number}"
        answers = {f"maps?{place}": self.answer(f"maps?{place}")}
        for caption in captions:
            words = f"caption={_escaped(caption)}"
            found = answers[f"search?{place}&{words}"] = self.answer(f"search?{place}&{words}")
            for model in found:
                for order, match in enumerate(model["matches"]):
                    paths = [f"picture?{place}&row={match['row']}"]
                    paths += [f"parts?{place}&row={match['row']}&{words}"] if order < EXPLAINED else []
                    answers |= {path: self.answer(path) for path in paths if path not in answers}
        return answers


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

    Raises:
        ModuleNotFoundError: the packages of the extra `explore` are missing.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol

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

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # uvicorn itself waits for ever for the rest of a request.
            self.loop.call_later(CLIENT_TIMEOUT_SECONDS, self.end_without_request)

        def end_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    routes = [
        Route("/", lambda request: HTMLResponse(page)), Route("/api/{name}", answer), Route("/picture", picture),
    ]  # fmt: skip
    # A page of another host whose name was made to lead here is refused.
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"])]
    application = Starlette(routes=routes, middleware=middleware, exception_handlers={ConfigError: refusal})
    return uvicorn.Server(
        uvicorn.Config(
            application, http=Connection, ws="none", lifespan="off", log_level="critical",
            limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=MOST_REQUEST_BYTES,
            timeout_graceful_shutdown=1, headers=[("X-Content-Type-Options", "nosniff"), ("Connection", "close")],
        )
    )  # fmt: skip


def _curves(run: ExploredRun) -> dict[str, Any]:
    if run.folder is None:
        return {"name": run.name, "is_training": False, "state": "no run", "curves": []}
    log = TrainingLog.read(run.folder)
    training, evaluations = training_curves(log.training, run.loss_unit), evaluation_curves(log.evaluations)
    curves = [_thinned(curve, curve.name in FIRST) for curve in training]
    curves += [_thinned(curve, True) for curve in evaluations]
    finished = is_finished(run.folder)
    return {"name": run.name, "is_training": not finished, "state": _state(run, log, finished), "curves": curves}


def _state(run: ExploredRun, log: TrainingLog, finished: bool) -> str:
    assert run.folder is not None
    step = f"{run.step:,}" if run.step is not None else "unknown"
    if finished:
        return f"finished, checkpoint of step {step}"
    logged = max((int(line["step"]) for line in (*log.training, *log.evaluations)), default=0)
    complete = [path for path in checkpoints_in(run.folder / "checkpoints") if mark_of(path).exists()]
    newer = max((step_of(path) for path in complete), default=0)
    hint = f"; run clipzoo explore again for the checkpoint of step {newer:,}" if newer > (run.step or 0) else ""
    return f"not finished, step {logged:,} is logged; pictures are ranked by the checkpoint of step {step}{hint}"


def _thinned(curve: Curve, main: bool) -> dict[str, Any]:
    """At most MOST_VALUES values of a curve, the last one included; those that are no number are left out.

    main: the page shows it without being asked.
    """
    points = [point for point in zip(curve.steps, curve.values, strict=True) if abs(point[1]) < float("inf")]
    stride = -(-len(points) // MOST_VALUES) or 1
    points = points[::-stride][::-1]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return {"title": curve.title, "unit": curve.unit, "main": main, "steps": steps, "values": values}


def _matches(answers: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """Pictures in the answers for one collection."""
    searches = [model for path in answers if path.startswith(f"search?{place}") for model in answers[path]]
    pictures = [answers[path] for path in answers if path.startswith(f"picture?{place}")]
    retrieved = [match for model in searches if model["memory"] for match in model["memory"]["retrieved"]]
    others = [*searches, *(model for picture in pictures for model in picture["neighbours"])]
    return retrieved + [match for model in others for match in model["matches"]]


def _escaped(text: str) -> str:
    """Escape as encodeURIComponent does."""
    return quote(text, safe="!~*'()")


def _caption(query: Mapping[str, str]) -> str:
    caption = query.get("caption", "").strip()
    if not caption:
        raise ConfigError("type a caption first")
    return caption[:MOST_LETTERS]


def _number(query: Mapping[str, str], name: str, count: int) -> int:
    text = query.get(name, "")[:20]
    if not text.isdecimal() or int(text) >= count:
        raise ConfigError(f"{name} must be a number from 0 to {count - 1}, not {text!r}")
    return int(text)
