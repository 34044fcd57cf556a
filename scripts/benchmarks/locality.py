"""Bytes of remote shards that a node reads with data.locality=node: simulated for 8 to 128 nodes, measured for 2 and 4.

    python scripts/benchmark.py locality --output docs/benchmarks/readings/loading/locality.json

Simulated: shards like CC12M's, of 10,000 samples with log-normal sizes, in windows of 16; in every epoch a node reads
its segments again, as with a cache of two windows. Measured: gloo processes, one for each node, with a cache each, read
shards from a local HTTP server that counts their bytes. Plan: the cost of a step with a billion samples.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import tarfile
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import log, memory_mib, publish
from benchmarks.loader import add_sample
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count
from clipzoo.data.plan import Ids, Nodes, Plan
from clipzoo.io.stores import RANGE_BYTES

SAMPLES, WINDOW = 10_000, 16
MEDIAN_BYTES, SPREAD = 30_000, 0.6
"""Median and standard deviation of the logarithm of a sample's size."""
CLIENT = "X-Client"
MEASURED_BATCH, MEASURED_EPOCHS, MEASURED_SHARDS, MEASURED_SAMPLES, MEASURED_WINDOW = 512, 2, 24, 400, 4


def add_options(parser: Parser) -> None:
    parser.add_argument("--shards", type=number_in(Count), default=1200)
    parser.add_argument("--epochs", type=number_in(Count), default=2)


def main(options: argparse.Namespace) -> None:
    counts = np.full(options.shards, SAMPLES)
    simulated = []
    for batch in (8192, 32768):
        for nodes in (8, 16, 32, 64, 128):
            simulated.append(simulate(counts, batch, nodes, options.epochs))
            log(simulated[-1])
    measured = [measure(nodes) for nodes in (2, 4)]
    plans = [in_child(plan_cost, samples) for samples in (10**7, 10**9)]
    publish(options, {"simulated": simulated, "measured": measured, "plan": plans})


def owners_of(nodes: Nodes, counts: Ids, sample_ids: Ids) -> Ids:
    starts = np.cumsum(counts) - counts
    shards = starts.searchsorted(sample_ids, side="right") - 1
    return nodes.owners(shards, sample_ids - starts[shards], counts[shards])


def simulate(counts: Ids, batch: int, nodes: int, epochs: int) -> dict[str, float]:
    """Return the bytes of a node and epoch as a fraction of dataset / nodes, and the requests of a node and step."""
    sizes = np.random.default_rng(0).lognormal(np.log(MEDIAN_BYTES), SPREAD, int(counts.sum()))
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    starts, steps = np.cumsum(counts) - counts, int(counts.sum()) * epochs // batch
    assignment, plan = Nodes(range(nodes), 0), Plan([counts.tolist()], [1.0], 0, WINDOW, batch)
    segments, segment_requests = np.zeros(nodes), np.zeros(nodes)
    for node in range(nodes):
        for shard, count in enumerate(counts.tolist()):
            first, end = starts[shard] + np.array(Nodes(range(nodes), node).segment(shard, count))
            segments[node] += ends[end] - ends[first]
            segment_requests[node] += np.ceil((ends[end] - ends[first]) / RANGE_BYTES)
    singles, requests = np.zeros(nodes), np.zeros(nodes)
    for step in range(steps):
        sample_ids = plan.rows(step).sample_id
        owners = owners_of(assignment, counts, sample_ids)
        readers = assignment.readers(owners)
        assert (np.bincount(readers, minlength=nodes) == batch // nodes).all()
        other = readers != owners
        singles += np.bincount(readers[other], sizes[sample_ids[other]], minlength=nodes)
        requests += np.bincount(readers[other], minlength=nodes)
    share = (segments + singles / epochs) / (sizes.sum() / nodes)
    per_step = requests / steps + segment_requests * epochs / steps
    return {
        "global batch": batch,
        "nodes": nodes,
        "mean of nodes": round(float(share.mean()), 4),
        "maximum of nodes": round(float(share.max()), 4),
        "requests of a node and step": round(float(per_step.mean()), 2),
        "samples requested singly": round(float(requests.sum() / steps / batch), 4),
    }


# Real processes and a server.


class Handler(BaseHTTPRequestHandler):
    """Answers requests for ranges of the files of `folder`, and counts the bytes of every client."""

    protocol_version = "HTTP/1.1"
    folder: Path
    sent: Counter[str] = Counter()
    requests: Counter[str] = Counter()

    def do_GET(self) -> None:  # noqa: N802 - the name of http.server
        path = self.folder / self.path.lstrip("/")
        size = path.stat().st_size
        limits = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = map(int, limits.groups()) if limits else (0, size - 1)
        self.send_response(206 if limits else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as file:
                file.seek(first)
                self.wfile.write(file.read(last + 1 - first))
            self.sent[self.headers.get(CLIENT, "")] += last + 1 - first
            self.requests[self.headers.get(CLIENT, "")] += 1

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def measure(nodes: int) -> dict[str, Any]:
    """Return the bytes that every node received in an epoch with each setting, as a fraction of the dataset."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, generator = Path(scratch), np.random.default_rng(0)
        for shard in range(MEASURED_SHARDS):
            with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
                for number in range(shard * MEASURED_SAMPLES, (shard + 1) * MEASURED_SAMPLES):
                    side = min(96, int(generator.lognormal(3.4, 0.4)) + 8)
                    pixels = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
                    add_sample(archive, number, Image.fromarray(pixels), f"number {number}", quality=95)
        dataset = sum(path.stat().st_size for path in folder.glob("*.tar"))
        Handler.folder, Handler.sent, Handler.requests = folder, Counter(), Counter()
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        context, windows = get_context("spawn"), 2.5 * MEASURED_WINDOW / MEASURED_SHARDS * dataset
        # The first node writes the index, whose bytes are not counted.
        runs = {"index": windows, "none": windows, "node": windows / nodes, "node, the cache of none": windows}
        for name, limit in runs.items():
            begin = time.monotonic()
            own = partial(read, address, folder, name, limit, nodes if name != "index" else 1, port)
            processes = [context.Process(target=own, args=(rank,)) for rank in range(nodes if name != "index" else 1)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                assert process.exitcode == 0
            log(name, f"{time.monotonic() - begin:.0f} s")
        server.shutdown()
        server.server_close()
    results: dict[str, Any] = {"nodes": nodes, "dataset MB": round(dataset / 1e6, 1)}
    steps = MEASURED_EPOCHS * MEASURED_SHARDS * MEASURED_SAMPLES // MEASURED_BATCH
    for name in list(runs)[1:]:
        clients = [f"{name}{rank}" for rank in range(nodes)]
        most = max(Handler.sent[client] for client in clients) / dataset / MEASURED_EPOCHS
        requests = max(Handler.requests[client] for client in clients) / steps
        results[name] = {
            "dataset read by a node and epoch": round(most, 4), "times dataset / nodes": round(most * nodes, 3),
            "requests of a node and step": round(requests, 2),
        }  # fmt: skip
    log(results)
    return results


def read(address: str, folder: Path, name: str, limit: float, nodes: int, port: str, rank: int) -> None:
    """Read the batches of one node. limit: of its cache, in bytes."""
    import fsspec
    import torch
    import torch.distributed as dist

    from clipzoo.data.dataset import ShardDataset
    from clipzoo.data.tokenizer import ClipTokenizer
    from clipzoo.distributed.world import World

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(nodes), LOCAL_RANK="0", GROUP_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )  # fmt: skip
    fsspec.config.conf["http"] = {"client_kwargs": {"headers": {CLIENT: f"{name}{rank}"}}}
    if nodes > 1:
        dist.init_process_group("gloo")
    world = World.from_process_group()
    data = ShardDataset(
        f"{address}/{{00000..{MEASURED_SHARDS - 1:05d}}}.tar", ClipTokenizer(77), image_size=8, crop_scale=(0.9, 1.0),
        decode="exact", interpolation="bicubic", flip=0.0, rand_augment=None, max_pixels=10**6, caption_key=None,
        shuffle_window=MEASURED_WINDOW, max_bad_fraction=0.0, workers=1, prefetch=2,
        index_folder=str(folder / "index"), cache_folder=str(folder / f"cache of {name}{rank}"),
        cache_gigabytes=limit / 1e9, locality="node" if name.startswith("node") else "none",
    )  # fmt: skip
    data.open(None, world)
    steps = MEASURED_EPOCHS * data.samples // MEASURED_BATCH if name != "index" else 0
    batches = data.batches(
        seed=0, global_batch=MEASURED_BATCH, world=world, start_step=0, stop_step=steps, trim_text=False
    )
    for batch in batches:
        assert len(batch) == MEASURED_BATCH // nodes
        world.sum(torch.ones(1))  # nodes wait for each other, as in a training
    assert not data.counters()
    if nodes > 1:
        dist.barrier()
        dist.destroy_process_group()


# The plan of a billion samples.


def plan_cost(samples: int) -> dict[str, float]:
    """Return the seconds of a plan with its first step, of a further step, and the memory that they took."""
    memory, batch, nodes = memory_mib("VmRSS"), 32768, Nodes(range(128), 0)
    begin = time.perf_counter()
    counts = np.full(samples // SAMPLES, SAMPLES)
    plan = Plan([counts.tolist()], [1.0], 0, WINDOW, batch)

    def step(number: int) -> float:
        begin = time.perf_counter()
        nodes.rows(owners_of(nodes, counts, plan.rows(number).sample_id))
        return time.perf_counter() - begin

    step(0)
    first = time.perf_counter() - begin
    resumed = step(samples // batch * 2 + 5)
    return {
        "samples": samples, "first step, s": round(first, 3), "step after a resume, s": round(resumed, 3),
        "further step, ms": round(1000 * min(step(number) for number in range(1, 30)), 2),
        "MiB": round(memory_mib("VmHWM") - memory, 1),
    }  # fmt: skip


def in_child(function: Any, *arguments: Any) -> Any:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
