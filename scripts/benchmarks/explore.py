"""Time of one caption in the explorer among many pictures, by head.

    python scripts/benchmark.py explore --output docs/benchmarks/readings/explore.json

The model is the demo's, untrained; the index on disk repeats the embeddings of one block of random features. A query
embeds the caption and ranks the pictures as `clipzoo explore` does for each model; for CLOOB it also takes the weights
of the memory of all pictures. Times and CPU times of all threads are medians over 9 captions, after the first one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import built, publish
from clipzoo import io
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count
from clipzoo.explore.app import ExploredModel
from clipzoo.explore.index import BLOCK, FILE, NAMES, SearchIndex, facts_of, write_block
from clipzoo.loading import LoadedModel
from clipzoo.types import Features

HEADS = ("clip", "cloob", "wpse", "kme")
CAPTIONS = [f"a {colour} circle above a {other} square" for colour in ("red", "green", "blue") for other in "abc"]
SHARED = {"threads": 2}


def add_options(parser: Parser) -> None:
    parser.add_argument("--pictures", type=number_in(Count), default=50_000)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    readings = {head: measure(head, options.pictures) for head in options.heads}
    publish(options, {"pictures": options.pictures, "threads": options.threads, "milliseconds": readings})


def measure(head: str, pictures: int) -> dict[str, float]:
    """Return the median and the longest time of a query, its median CPU time and the first one's time, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        index = _index(head, pictures, Path(folder))
        begin = time.perf_counter()
        model = ExploredModel(head, index.model, lambda collection: index, None)
        model.ranked(0, "the first caption", 12)
        first = time.perf_counter() - begin
        times, cpu_times = [], []
        for caption in CAPTIONS:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            model.ranked(0, caption, 12)
            times.append(time.perf_counter() - begin)
            cpu_times.append(time.process_time() - begin_cpu)
    median, cpu = statistics.median(times), statistics.median(cpu_times)
    reading = {"median": median, "longest": max(times), "CPU": cpu, "first": first}
    return {name: round(1000 * seconds, 1) for name, seconds in reading.items()}


def _index(head: str, pictures: int, folder: Path) -> SearchIndex:
    """Write and open an index of embeddings of random features."""
    torch.manual_seed(0)
    model, _, config = built("experiment=demo/clip", f"head={head}", "head.embed_width=128")
    loaded, encoder = LoadedModel(model, config).eval(), config["encoder"]
    tokens = torch.randn(BLOCK, (encoder["image_size"] // 16) ** 2, encoder["image_width"])
    embedding = model.head.embed_image(Features(tokens.amax(dim=1), tokens))
    for number, first in enumerate(range(0, pictures, BLOCK)):
        write_block(folder, number, embedding[: pictures - first])
    names = [str(row) for row in range(pictures)]
    io.write_json(folder / NAMES, names)
    io.write_json(folder / FILE, facts_of(loaded, head, "random", names))
    return SearchIndex(folder, loaded)
