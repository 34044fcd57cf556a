"""Explore trained models in a browser: pictures by caption, neighbours, terms of a score, maps and curves.

clipzoo explore runs/demo
clipzoo explore runs/emoji/clip runs/emoji/wpse runs/emoji/kme
clipzoo explore runs/demo --images pictures/
clipzoo explore runs/demo --static page          page/index.html, which needs no server

The page is served only on this machine, and no data leaves it.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from clipzoo.cli.arguments import number_in, output_folder
from clipzoo.config.vocabulary import Range, Samples
from clipzoo.errors import ConfigError, installation
from clipzoo.io.weights import checkpoints_in, is_checkpoint, mark_of, step_of

if TYPE_CHECKING:
    from clipzoo.cli.models.explorer_site import Site

PORT = 8765


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="RUN", help="run directories, checkpoints, hub directories, or hf-hub:NAME"
    )
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument(
        "--images", help="explore a folder of images or tar shards instead of the evaluation datasets"
    )
    pictures.add_argument(
        "--dataset", action="append", default=[], metavar="NAME", help="only this evaluation dataset; repeatable"
    )
    parser.add_argument(
        "--limit", type=number_in(Samples), default=2000, help="pictures per dataset (default: %(default)s)"
    )
    page = parser.add_mutually_exclusive_group()
    page.add_argument(
        "--port", type=number_in(Annotated[int, Range(at_least=0, at_most=65535)]), default=PORT,
        help="port of the page; 0 for a free one (default: %(default)s)",
    )  # fmt: skip
    page.add_argument("--static", type=output_folder, metavar="DIR", help="write a page that needs no server, and end")
    parser.add_argument(
        "--captions", type=number_in(Samples), default=24, needs=["--static"],
        help="captions of each dataset (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=output_folder, metavar="DIR", help="folder for embeddings (default: RUN/explore)"
    )
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the runs' own classes")
    parser.set_defaults(run=explore)


def explore(options: argparse.Namespace) -> None:
    for source in options.models:
        _require_checkpoint(source)
    with tempfile.TemporaryDirectory() as temporary:
        site = _site(options, Path(temporary))
        if options.static is not None:
            from clipzoo.io import write_whole

            write_whole(options.static / "index.html", site.static(options.captions))
            print(options.static / "index.html")
            return
        from clipzoo.cli.models.explorer_site import listener, server

        try:
            running = server(site)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the page needs {error.name}: {installation('explore')}, or write a page that needs no server with "
                "--static DIR"
            ) from None
        with listener(options.port) as listening, suppress(KeyboardInterrupt):
            print(f"http://127.0.0.1:{listening.getsockname()[1]} (on this machine only; Ctrl-C ends it)", flush=True)
            running.run(sockets=[listening])


def _site(options: argparse.Namespace, temporary: Path) -> Site:
    from clipzoo.api.explore import Explorer, collection_of_images, collections_of, explored
    from clipzoo.cli.models.explorer_site import ExploredRun, Site
    from clipzoo.distributed.launch import say
    from clipzoo.loading import load
    from clipzoo.report.figures import loss_unit

    steps = [_step(source) for source in options.models]
    models = [load(source, trust=options.trust) for source in options.models]
    if options.images is not None:
        collections = [collection_of_images(options.images, options.limit)]
    else:
        config = next((model.config for model in models if "eval" in model.config), {})
        collections = collections_of(config, options.dataset, options.limit, say)
    names = _names(options.models)
    runs = [
        ExploredRun(name, model.folder, step, loss_unit(model.config))
        for name, model, step in zip(names, models, steps, strict=True)
    ]
    parts = []
    for name, source, model in zip(names, options.models, models, strict=True):
        # Sources may have one name; a path as a name would lead into the run.
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        own = model.folder / "explore" if model.folder else temporary / digest
        cache = options.cache / digest if options.cache else own
        parts.append(explored(name, source, model, collections, cache, say))
    return Site(Explorer(parts, collections), runs)


def _names(sources: Sequence[str]) -> list[str]:
    """Return the names of the folders, or the whole paths where names are equal."""
    short = [Path(source.rstrip("/")).name for source in sources]
    names = [name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _step(source: str) -> int | None:
    """Return the number of steps of the checkpoint that `load` reads; None for a model without checkpoints."""
    path = Path(source)
    if is_checkpoint(path):
        return step_of(path)
    complete = [one for one in checkpoints_in(path / "checkpoints") if mark_of(one).exists()]
    return step_of(complete[-1]) if complete else None


def _require_checkpoint(source: str) -> None:
    """Raise ConfigError for a run that has not saved a checkpoint yet."""
    path = Path(source)
    if (path / "config.yaml").exists() and _step(source) is None:
        from clipzoo.runs.directory import config_of

        every = config_of(path)["trainer"].get("checkpoints", {}).get("every")
        raise ConfigError(
            f"{source} has no checkpoint yet (trainer.checkpoints.every={every}): explore it after its first one; "
            f"clipzoo report {source} shows its curves"
        )
