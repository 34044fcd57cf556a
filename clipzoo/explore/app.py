"""The explorer of `clipzoo explore`: its answers, and its page, served to a browser or written to one file.

The server needs the packages of the extra `explore`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import math
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Subset

from clipzoo.distributed.launch import say
from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.scoring import exact_products
from clipzoo.evaluation.suite import dataset_key
from clipzoo.explore.index import Gallery, SearchIndex, build_index, read_gallery
from clipzoo.exports.hub import load
from clipzoo.io import below, write_whole
from clipzoo.io.weights import checkpoints_in, mark_of, step_of
from clipzoo.loading import LoadedModel
from clipzoo.report.figures import FIRST, Curve, evaluation_curves, objective_constant, training_curves
from clipzoo.report.pages import explorer_page
from clipzoo.runs.directory import is_finished
from clipzoo.runs.record import TrainingLog
from clipzoo.training.diagnostics import unit_vectors
from clipzoo.types import Embedding

if TYPE_CHECKING:
    import uvicorn

Answer = dict[str, Any]
"""Plain values that JSON can write."""
RETRIEVED = 8
"""Images of CLOOB's memory that are shown."""
CANDIDATES = 2000
"""Pictures that KME-CLIP scores exactly: those with the best approximate scores; see `SearchIndex.search`."""
MOST_POINTS = 2000
"""Maximum number of pictures in a map."""
FITS = {"shortest": "cover", "squash": "fill", "longest": "contain"}
"""How a page fits a picture into the square that the model sees, in CSS, by the mode of `Transform`."""
TASKS = ("retrieval", "zero_shot", "linear_probe")
REMEDY = "give --images FOLDER to explore a folder of images or tar shards"
ADDRESS = "127.0.0.1"
CLIENT_TIMEOUT_SECONDS = 20
"""Longest time to send a request, and longest pause of a client that reads an answer."""
MOST_CONNECTIONS, MOST_REQUEST_BYTES = 512, 16384
MATCHES, NEIGHBOURS, EXPLAINED = 12, 8, 4
"""Pictures per caption, neighbours per picture, and pictures per caption that a static page explains by parts."""
CHOICES = 1000
MOST_LETTERS, MOST_VALUES = 500, 400
"""Letters of a caption, and values of a curve."""


def run(options: argparse.Namespace, steps: Sequence[int | None]) -> None:
    """Serve the page of `clipzoo explore`, or write it. steps: those of the loaded checkpoints, or None."""
    with tempfile.TemporaryDirectory() as temporary:
        models = [load(source, trust=options.trust) for source in options.models]
        if options.images is not None:
            collections = [collection_of_images(options.images, options.limit)]
        else:
            config = next((model.config for model in models if "eval" in model.config), {})
            collections = collections_of(config, options.dataset, options.limit)
        parts = []
        for name, source, model, step in zip(names_of(options.models), options.models, models, steps, strict=True):
            # Sources may share a name, and a path as a folder name would lead into the run.
            digest = hashlib.sha256(source.encode()).hexdigest()[:16]
            default_cache = model.folder / "explore" if model.folder else Path(temporary) / digest
            cache_folder = options.cache / digest if options.cache else default_cache
            parts.append(explored(name, source, model, collections, cache_folder, step))
        explorer = Explorer(parts, collections)
        if options.static is not None:
            write_whole(options.static / "index.html", explorer.static(options.captions))
            print(options.static / "index.html")
            return
        try:
            running = server(explorer)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the page needs {error.name}: {installation('explore')}, or write a page that needs no server with "
                "--static DIR"
            ) from None
        with listener(options.port) as listening, suppress(KeyboardInterrupt):
            print(f"http://{ADDRESS}:{listening.getsockname()[1]} (on this machine only; Ctrl-C ends it)", flush=True)
            running.run(sockets=[listening])


def names_of(sources: Sequence[str]) -> list[str]:
    """Return the names of the folders, or the whole paths where names are equal."""
    short = [Path(source.rstrip("/")).name for source in sources]
    names = [name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


@dataclass(frozen=True)
class Collection:
    """Pictures with their captions or classes.

    gallery: the pictures; their number in the dataset is their name. captions: captions of each picture, or none.
    choices: captions to choose from: those of the pictures, or a prompt for each class. labels: class of each picture.
    total: pictures of the dataset, of which the gallery may be a part.
    """

    name: str
    gallery: Gallery
    total: int
    captions: Mapping[int, Sequence[str]] = field(default_factory=dict)
    choices: Sequence[str] = ()
    labels: Sequence[int] = ()
    class_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.gallery.names)


def collections_of(config: Mapping[str, Any], names: Sequence[str], limit: int) -> list[Collection]:
    """Return the evaluation datasets of a run's configuration; missing ones are reported.

    names: datasets to open; empty for all. limit: pictures of each, evenly spaced. Raises ConfigError without datasets.
    """
    node = config.get("eval") or {}
    dataset_names = list(dict.fromkeys(name for task in TASKS for name in node.get(task) or ()))
    if not dataset_names:
        raise ConfigError(f"the run has no evaluation data (its eval lists no dataset): {REMEDY}")
    if unknown := [name for name in names if name not in dataset_names]:
        raise ConfigError(
            f"--dataset {unknown[0]} is not an evaluation dataset of the run (it has: {', '.join(dataset_names)})"
        )
    collections, missing = [], []
    for name in names or dataset_names:
        try:
            dataset = open_benchmark(name, Path(node["root"]), node.get("prompts", "set"))
            collections.append(_collection(dataset, node["root"], limit))
        except MissingDatasetError as error:
            missing.append(str(error))
    if not collections:
        raise ConfigError("\n         ".join([*missing, f"no evaluation dataset of the run was found: {REMEDY}"]))
    for message in missing:
        say(f"left out: {message}")
    return collections


def collection_of_images(source: str, limit: int) -> Collection:
    """Return the images of a folder, or of tar shards. Raises ConfigError if there are none."""
    gallery = read_gallery(source)
    rows = _spaced(len(gallery.names), limit)
    names = [gallery.names[row] for row in rows]
    # Pictures that change under their names are embedded again.
    changed = max((path.stat().st_mtime_ns for path in Path(source).rglob("*")), default=0)
    chosen = Gallery(f"{source} {len(gallery.names)} {changed}", names, Subset(gallery.images, rows))  # type: ignore[arg-type]
    return Collection(Path(source).name or source, chosen, len(gallery.names))


def _collection(dataset: EvaluationDataset, root: str, limit: int) -> Collection:
    images = dataset.splits["test"].images if isinstance(dataset, ClassificationDataset) else dataset.images
    count = len(images)
    rows = _spaced(count, limit)
    source = hashlib.sha256(f"{root} {dataset_key('', dataset)} {count}".encode()).hexdigest()
    gallery = Gallery(source, [str(row) for row in rows], Subset(images, rows))  # type: ignore[arg-type]
    if isinstance(dataset, ClassificationDataset):
        prompts = [dataset.templates[0].replace("{c}", name) for name in dataset.class_names]
        labels = [dataset.splits["test"].labels[row] for row in rows]
        return Collection(dataset.name, gallery, count, {}, prompts, labels, dataset.class_names)
    if not isinstance(dataset, RetrievalDataset):
        return Collection(dataset.name, gallery, count)
    places = {row: place for place, row in enumerate(rows)}
    captions: dict[int, list[str]] = {}
    for caption, row in zip(dataset.captions, map(int, dataset.caption_image), strict=True):
        if row in places:
            captions.setdefault(places[row], []).append(caption)
    choices = list(dict.fromkeys(texts[0] for texts in captions.values()))
    return Collection(dataset.name, gallery, count, captions, choices)


def _spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` rows, evenly spaced."""
    return [math.floor(place * max(1.0, count / limit)) for place in range(min(count, limit))]


# The models of the page, and the answers to its questions as plain values that JSON can write.


class ExploredModel:
    """A model with an index of each collection, built at the first question. step: of its checkpoint, if any."""

    def __init__(self, name: str, model: LoadedModel, build: Callable[[int], SearchIndex], step: int | None) -> None:
        self.name, self.model, self.step = name, model, step
        self.index, self.map = cache(build), cache(self._map)

    def ranked(self, collection: int, caption: str, count: int) -> Answer:
        """Pictures with the highest scores, best first, and for CLOOB the pictures that the caption retrieves."""
        index = self.index(collection)
        text = index.embed(caption)
        memory = None
        with torch.no_grad(), exact_products():
            weights = self.model.head.memory_weights(text, index.images)
        if weights is not None:
            order = weights[0].sort(descending=True, stable=True).indices[:RETRIEVED].tolist()
            retrieved = [{"row": row, "weight": round(float(weights[0, row]), 6)} for row in order]
            # 1 / sum_i w_i^2 is the number of equally weighted pictures with this sum.
            memory = {"retrieved": retrieved, "patterns": round(float(1 / weights[0].square().sum()), 1)}
        return {"model": self.name, "matches": _matches(index, text, count), "memory": memory}

    def neighbours(self, collection: int, row: int, count: int) -> Answer:
        """Pictures that are most similar to one, without itself."""
        index = self.index(collection)
        matches = _matches(index, index.images[row : row + 1], count + 1)
        return {"model": self.name, "matches": [match for match in matches if match["row"] != row][:count]}

    def curves(self) -> Answer:
        """Curves of the model's run, and the run's state in words."""
        folder = self.model.folder
        if folder is None:
            return {"name": self.name, "is_training": False, "state": "no run", "curves": []}
        log = TrainingLog.read(folder)
        training = training_curves(log.training, objective_constant(self.model.config, "loss_unit"))
        curves = [thinned(curve, curve.name in FIRST) for curve in training]
        curves += [thinned(curve, True) for curve in evaluation_curves(log.evaluations)]
        step, finished = f"{self.step:,}" if self.step is not None else "unknown", is_finished(folder)
        state = f"finished, checkpoint of step {step}"
        if not finished:
            logged = max((int(line["step"]) for line in (*log.training, *log.evaluations)), default=0)
            complete = [path for path in checkpoints_in(folder / "checkpoints") if mark_of(path).exists()]
            newer = max((step_of(path) for path in complete), default=0)
            state = f"not finished, step {logged:,} is logged; pictures are ranked by the checkpoint of step {step}"
            if newer > (self.step or 0):
                state += f"; run clipzoo explore again for the checkpoint of step {newer:,}"
        return {"name": self.name, "is_training": not finished, "state": state, "curves": curves}

    def _map(self, collection: int) -> Answer:
        """The first two principal components of the pictures' embeddings, and their shares of the variance."""
        images = self.index(collection).images
        vectors = unit_vectors(images[_mapped(len(images))]).float()
        # A low-rank method, with 12 iterations of width 8: only two components are needed.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            left, lengths, _ = torch.pca_lowrank(vectors, min(8, *vectors.shape), niter=12)
        # One picture has one component.
        left, lengths = pad(left, (0, 1)), pad(lengths, (0, 1))
        points = left[:, :2] * lengths[:2]
        share = lengths[:2].square() / (vectors - vectors.mean(dim=0)).square().sum().clamp(min=1e-30)
        scale = points.abs().max().clamp(min=1e-30)
        return {
            "model": self.name,
            "points": [[round(value, 3) for value in point] for point in (points / scale).tolist()],
            "variance": [round(float(part), 4) for part in share],
        }


@dataclass(frozen=True)
class Explorer:
    """Several models on the same collections of pictures, and the answers to the paths that the page asks for."""

    models: Sequence[ExploredModel]
    collections: Sequence[Collection]

    def answer(self, path: str) -> Any:
        """Return the answer to a path, such as "search?collection=0&caption=a%20circle". Raises ConfigError."""
        name, _, text = path.partition("?")
        query = dict(parse_qsl(text, keep_blank_values=True))
        if name == "overview":
            return {"runs": [model.name for model in self.models], "collections": self.overview(CHOICES)}
        if name == "curves":
            return [model.curves() for model in self.models]
        collection = _number(query, "collection", len(self.collections))
        pictures = self.collections[collection]
        if name == "maps":
            rows = _mapped(len(pictures)).tolist()
            labels = [pictures.labels[row] for row in rows] if pictures.labels else []
            return {"rows": rows, "labels": labels, "models": [model.map(collection) for model in self.models]}
        if name == "search":
            caption = _caption(query)
            return [model.ranked(collection, caption, MATCHES) for model in self.models]
        row = _number(query, "row", len(pictures))
        if name == "picture":
            label = pictures.class_names[pictures.labels[row]] if pictures.labels else None
            neighbours = [model.neighbours(collection, row, NEIGHBOURS) for model in self.models]
            captions = list(pictures.captions.get(row, ()))
            return {"name": pictures.gallery.names[row], "captions": captions, "class": label, "neighbours": neighbours}
        if name == "parts":
            # Patches and words that carry the score; one answer per model that has points.
            caption, image = _caption(query), pictures.gallery.images[row]
            answers = [(model.name, explanation(model.model, image, caption)) for model in self.models]
            return [{"model": model, **answer} for model, answer in answers if answer is not None]
        raise ConfigError(f"unknown request {name!r}")

    def jpeg(self, text: str) -> bytes:
        """Return the picture of a query such as "collection=0&row=5" as JPEG, at most 192 pixels long."""
        query = dict(parse_qsl(text))
        collection = _number(query, "collection", len(self.collections))
        row = _number(query, "row", len(self.collections[collection]))
        image = self.collections[collection].gallery.images[row].convert("RGB")
        image.thumbnail((192, 192))
        content = io.BytesIO()
        image.save(content, "JPEG", quality=88)
        return content.getvalue()

    def overview(self, choices: int) -> list[Answer]:
        """Facts of the collections. choices: maximum number of captions to choose from."""
        return [
            {
                "name": collection.name, "count": len(collection), "total": collection.total,
                "choices": list(collection.choices[:choices]), "classes": list(collection.class_names),
            }
            for collection in self.collections
        ]  # fmt: skip

    def static(self, captions: int) -> str:
        """Return the page with the answers for the first `captions` captions of each collection."""
        overview = {**self.answer("overview"), "collections": self.overview(captions)}
        answers: dict[str, Any] = {"overview": overview, "curves": self.answer("curves")}
        pictures: dict[str, str] = {}
        for number, collection in enumerate(overview["collections"]):
            place = f"collection={number}"
            paths = {f"maps?{place}"}
            rows: set[int] = set()
            for caption in collection["choices"]:
                words = f"caption={escaped(caption)}"
                ranked = answers[f"search?{place}&{words}"] = self.answer(f"search?{place}&{words}")
                for model in ranked:
                    matches = [match["row"] for match in model["matches"]]
                    rows |= {*matches, *(match["row"] for match in (model["memory"] or {}).get("retrieved", ()))}
                    paths |= {f"picture?{place}&row={row}" for row in matches}
                    paths |= {f"parts?{place}&row={row}&{words}" for row in matches[:EXPLAINED]}
            answers |= {path: self.answer(path) for path in sorted(paths)}
            for path in paths:
                similar = answers[path]["neighbours"] if path.startswith("picture") else ()
                rows |= {match["row"] for model in similar for match in model["matches"]}
            for row in sorted(rows):
                jpeg = base64.b64encode(self.jpeg(f"{place}&row={row}")).decode()
                pictures[f"{number}/{row}"] = f"data:image/jpeg;base64,{jpeg}"
        return explorer_page({"answers": answers, "pictures": pictures})


def explored(
    name: str, source: str, model: LoadedModel, collections: Sequence[Collection], folder: Path, step: int | None = None
) -> ExploredModel:
    """Return the model with an index of each collection, that of the first one already built.

    source: name for `clipzoo.load`. folder: keeps embeddings of these weights and pictures. step: of the checkpoint.
    """

    def build(number: int) -> SearchIndex:
        collection = collections[number]
        index = build_index(
            model, source, collection.gallery, below(folder, re.sub(r"[^\w.-]", "_", collection.name)), replace=True,
            report=lambda line: say(f"{name}, {collection.name}: {line}"),
        )  # fmt: skip
        assert index is not None
        # The first search loads what later ones reuse.
        index.nearest(index.embed(""), 1, CANDIDATES)
        return index

    explored = ExploredModel(name, model, build, step)
    explored.index(0)
    return explored


def _matches(index: SearchIndex, query: Embedding, count: int) -> list[dict[str, float]]:
    return [{"row": row, "score": round(score, 4)} for row, score in index.nearest(query, count, CANDIDATES)]


def _mapped(count: int) -> Tensor:
    """Rows of a map, evenly spaced."""
    return torch.linspace(0, count - 1, min(count, MOST_POINTS)).round().long()


@torch.no_grad()
def explanation(model: LoadedModel, image: Image, caption: str) -> dict[str, Any] | None:
    """Return the terms of a score by patch and word; None for a head that compares one vector per sample.

    score: the logit. is_logarithm: the logit is the logarithm of the terms' sum. side: patches in a row and in a
    column; 0 if the tokens are not a square grid. prefix: tokens before the patches. fit: see FITS. words: texts of the
    tokens. values: a row per token of the image, a column per word. image_weights, text_weights: of the points.
    """
    ids = model.tokenizer([caption])
    image_features, text_features = model.image_features(model.transform(image)[None]), model.text_features(ids)
    with exact_products():
        parts = model.head.score_parts(image_features, text_features)
    if parts is None or image_features.tokens is None:
        return None
    prefix, side = grid(image_features.tokens.shape[1])
    # Texts of the tokens up to the end of the caption.
    tokenizer: Any = model.tokenizer
    tokens = ids[0].tolist()
    end = tokens.index(tokenizer.end_token) + 1 if tokenizer.end_token in tokens else len(tokens)
    words = [f"token {place}" for place in range(1, end + 1)]
    if hasattr(tokenizer, "pieces"):
        words = [piece.strip() for piece in tokenizer.pieces(tokens[:end])]
    values, text_weights = parts.values[0].double(), parts.text_weights[0]
    # Padding that is part of the score is one column.
    padding = values[:, len(words) :].sum(dim=1, keepdim=True)
    values, weights = values[:, : len(words)], text_weights[: len(words)].tolist()
    if bool((padding != 0).any()):
        words, weights = [*words, "padding"], [*weights, float(text_weights[len(words) :].sum())]
        values = torch.cat([values, padding], dim=1)
    return {
        "score": round(float(parts.score), 4), "is_logarithm": parts.is_logarithm, "side": side, "prefix": prefix,
        "fit": FITS[model.transform.resize_mode],
        "words": words, "values": [[float(f"{value:.4g}") for value in row] for row in values.tolist()],
        "image_weights": [float(f"{weight:.4g}") for weight in parts.image_weights[0].tolist()],
        "text_weights": [float(f"{weight:.4g}") for weight in weights],
    }  # fmt: skip


def grid(tokens: int) -> tuple[int, int]:
    """Return the number of tokens before the patches, and the side of the square of patches; 0, 0 without a square."""
    side = math.isqrt(tokens)
    prefix = tokens - side * side  # CLS and registers, at most eight
    return (prefix, side) if prefix <= min(8, side) else (0, 0)


def thinned(curve: Curve, main: bool) -> dict[str, Any]:
    """At most MOST_VALUES finite values of a curve, the last one included. main: the page shows it at once."""
    points = [point for point in zip(curve.steps, curve.values, strict=True) if abs(point[1]) < float("inf")]
    stride = -(-len(points) // MOST_VALUES) or 1
    points = points[::-stride][::-1]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return {"title": curve.title, "unit": curve.unit, "main": main, "steps": steps, "values": values}


def escaped(text: str) -> str:
    """Escape as encodeURIComponent does."""
    return quote(text, safe="!~*'()")


def _caption(query: Mapping[str, str]) -> str:
    if not (caption := query.get("caption", "").strip()):
        raise ConfigError("type a caption first")
    return caption[:MOST_LETTERS]


def _number(query: Mapping[str, str], name: str, count: int) -> int:
    text = query.get(name, "")[:20]
    if not text.isdecimal() or int(text) >= count:
        raise ConfigError(f"{name} must be a number from 0 to {count - 1}, not {text!r}")
    return int(text)


def listener(port: int) -> socket.socket:
    """Return a socket that listens on this machine only. port: 0 for a free one. Raises ConfigError if it is in use."""
    try:
        listening = socket.create_server((ADDRESS, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): give another --port, or --port 0") from None
    # Connections inherit it: the kernel ends those whose client stops reading.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CLIENT_TIMEOUT_SECONDS)
    return listening


def server(explorer: Explorer) -> uvicorn.Server:
    """Return the server of the page, `run(sockets=[listener(port)])`; ModuleNotFoundError without the extra `explore`.

    A connection carries one request, which must arrive within CLIENT_TIMEOUT_SECONDS.
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
            return JSONResponse(explorer.answer(f"{request.path_params['name']}?{request.url.query}"))

    def picture(request: Request) -> Response:
        with lock:
            return Response(explorer.jpeg(request.url.query), media_type="image/jpeg")

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # uvicorn has no time limit for receiving a request.
            self.loop.call_later(CLIENT_TIMEOUT_SECONDS, self.end_without_request)

        def end_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    routes = [
        Route("/", lambda request: HTMLResponse(page)), Route("/api/{name}", answer), Route("/picture", picture),
    ]  # fmt: skip
    # Refuse pages of other hosts whose name resolves to this address (DNS rebinding).
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"])]
    refusals = {ConfigError: lambda request, error: JSONResponse({"error": str(error)}, HTTPStatus.BAD_REQUEST)}
    application = Starlette(routes=routes, middleware=middleware, exception_handlers=refusals)
    return uvicorn.Server(
        uvicorn.Config(
            application, http=Connection, ws="none", lifespan="off", log_level="critical",
            limit_concurrency=MOST_CONNECTIONS, h11_max_incomplete_event_size=MOST_REQUEST_BYTES,
            timeout_graceful_shutdown=1, headers=[("X-Content-Type-Options", "nosniff"), ("Connection", "close")],
        )
    )  # fmt: skip
