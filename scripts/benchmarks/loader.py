"""Throughput of only the loader, compared with open_clip: same shards, crops and workers; interleaved medians.

    python scripts/benchmark.py loader --output docs/benchmarks/readings/loader.json

All loaders stay alive with one thread per worker and read some batches in turn; the ratio is that of the medians over
the rounds. "samples_per_work_second" counts the CPU time of all processes of a loader, which a busy machine affects
less than the wall clock. Ours decodes with simplejpeg (the extra `fast`) and without it. open_clip needs an older
webdataset, which `make bench` installs in .peer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import PEER, ROOT, log, medians, memory_mib, publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count, Workers
from clipzoo.data.plan import Plan

SHARDS = 4
CASES = (
    # width, height, image_size
    (400, 300, 96),
    (400, 300, 224),
    (512, 384, 224),
    (512, 512, 224),
    (1024, 768, 224),
)
SIDES = {
    "exact": ("clipzoo", "exact", True), "exact, PIL": ("clipzoo", "exact", False),
    "fast": ("clipzoo", "fast", True), "fast, PIL": ("clipzoo", "fast", False),
    "open_clip": ("open_clip", "-", False),
}  # fmt: skip
"""Program, data.decode, and whether simplejpeg (the extra `fast`) decodes."""


SHARED = {"rounds": 5, "batch": 64}


def add_options(parser: Parser) -> None:
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="where the shards are made")
    parser.add_argument("--peer", type=Path, default=PEER, help="folder of webdataset 0.2.86 and pandas")
    parser.add_argument(
        "--samples", type=number_in(Count), default=1024, help="in each set of shards, read in each round"
    )
    parser.add_argument("--workers", type=number_in(Workers), nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=number_in(Count), nargs="*", help="only the cases with these crop sizes")


def main(options: argparse.Namespace) -> None:
    result = {
        "what": "only the loader, samples/s; crop scale 0.5 to 1, bicubic, CLIP's tokenizer",
        "batch": options.batch,
        "rounds": options.rounds,
        "cases": [
            compare(options, case, workers)
            for case in CASES
            if not options.sizes or case[2] in options.sizes
            for workers in options.workers
        ],
        "memory": memory_over_epochs(options),
        "plan": plan_cost(),
    }
    publish(options, result)


def compare(options: argparse.Namespace, case: tuple[int, int, int], workers: int) -> dict:
    """Return medians, and ratios to open_clip, for one image size and number of workers."""
    width, height, size = case
    shards = photographs(options.folder, width, height, options.samples)
    loaders = {name: Loader(options, shards, size, workers, *side) for name, side in SIDES.items()}
    readings: dict[str, list[dict]] = {name: [] for name in loaders}
    # Batches prepared while other loaders were measured must not count.
    prepared = 2 * workers + 1
    for turn in range(options.rounds + 1):
        for name, loader in loaders.items():
            loader.read(prepared)
            reading = loader.read(max(prepared, options.samples // options.batch))
            # Wait until the workers are idle, so that they do not disturb the next measurement.
            loader.read(0)
            if turn:
                readings[name].append(reading)
    for loader in loaders.values():
        loader.close()
    rates, work = (
        medians({name: [reading["samples"] / reading[key] for reading in part] for name, part in readings.items()})
        for key in ("seconds", "work")
    )
    result = {
        "image": f"{width} x {height}",
        "image_size": size,
        "workers": workers,
        "samples_per_second": rates,
        "samples_per_work_second": work,
        "ratio": {name: rate / rates["open_clip"] for name, rate in rates.items()},
        "work_ratio": {name: rate / work["open_clip"] for name, rate in work.items()},
        "difference": difference(shards, size),
    }
    log(json.dumps(result))
    return result


def started(peer: Path, side: str, errors: int | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start loader_process.py in a new session. peer: folder of the packages that open_clip needs. errors: stderr."""
    program = str(ROOT / "scripts" / "benchmarks" / "loader_process.py")
    path = f"{peer}:{ROOT}" if side == "open_clip" else str(ROOT)
    return subprocess.Popen(
        [sys.executable, program, json.dumps({"side": side, **options})],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
    )  # fmt: skip


class Loader:
    """A loader in its own process, see loader_process.py."""

    def __init__(
        self,
        options: argparse.Namespace,
        shards: str,
        size: int,
        workers: int,
        side: str,
        decode: str,
        simplejpeg: bool,
    ) -> None:
        self._process = started(
            options.peer, side, task="speed", shards=shards, image_size=size, crop_scale=[0.5, 1.0], seed=0,
            batch=options.batch, workers=workers, decode=decode, simplejpeg=simplejpeg, resampled=False,
        )  # fmt: skip

    def read(self, batches: int) -> dict[str, float]:
        """Read so many batches; 0 waits until the workers are idle."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{batches}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a loader ended too early, see the error above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def difference(shards: str, size: int) -> dict[str, float]:
    """Return the mean absolute difference (of 255) from PIL's decoding and resizing of the same crop."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resized_crop

    from clipzoo.data.images import ImageTransform, random_crop
    from clipzoo.data.plan import generator

    with tarfile.open(shards.replace(f"{{00000..{SHARDS - 1:05d}}}", "00000")) as archive:
        images = [
            archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()[:80]
            if member.name.endswith("jpg")
        ]
    differences: dict[str, list[float]] = {"exact": [], "fast": []}
    for number, encoded in enumerate(images):
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        for decode, values in differences.items():
            transform = ImageTransform(size, (0.5, 1.0), "bicubic", 0.0, None, decode, 10**9)  # type: ignore[arg-type]
            crop = transform(encoded, generator("augment", 0, 0, number))[0]
            assert crop is not None
            box = random_crop(image.height, image.width, (0.5, 1.0), generator("augment", 0, 0, number))
            factors = (8, 4, 2) if decode == "fast" else ()
            grid = next((factor for factor in factors if min(box.height, box.width) >= factor * size), 1)
            top, left, tall, wide = (edge // grid * grid for edge in (box.top, box.left, box.height, box.width))
            expected = resized_crop(image, top, left, tall, wide, [size, size], InterpolationMode.BICUBIC)
            values.append(float(np.abs(crop.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected)).mean()))
    return {name: statistics.mean(values) for name, values in differences.items()}


def memory_over_epochs(options: argparse.Namespace) -> dict:
    """Return the private megabytes of a worker of each loader, after a first quarter and each of three epochs."""
    shards = photographs(options.folder, 400, 300, options.samples)
    epoch = options.samples // options.batch
    result = {}
    for name in ("exact", "open_clip"):
        loader = Loader(options, shards, 96, 1, *SIDES[name])
        loader.read(max(1, epoch // 4))
        result[name] = [round(loader.read(epoch)["worker_bytes"] / 1e6) for _ in range(3)]
        loader.close()
    return {"worker_megabytes_after_epochs": result}


def plan_cost() -> list[dict]:
    """Return the cost of a plan for CC3M, CC12M and two billion samples, each in a fresh process."""
    costs = []
    for shards, samples in ((332, 9_000), (1_242, 9_662), (200_000, 10_000)):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            costs.append(fresh.submit(_plan, shards, samples).result())
    return costs


def _plan(shards: int, samples: int) -> dict:
    """Return CPU seconds: of the first step, of a step in the third epoch after a resume, and of a whole epoch."""
    before = memory_mib("VmHWM")
    times = [time.process_time()]
    plan = Plan([[samples] * shards], [1.0], 0, 64, 2048)
    plan.rows(0)
    times.append(time.process_time())
    Plan([[samples] * shards], [1.0], 0, 64, 2048).rows(5 * shards * samples // 2 // 2048)
    times.append(time.process_time())
    steps = min(plan.samples // 2048, 6_000)
    for step in range(steps):
        plan.rows(step)
    times.append(time.process_time())
    first, resumed, whole = np.diff(times).tolist()
    peak = memory_mib("VmHWM")
    return {
        "samples": plan.samples, "shards": shards, "first_seconds": first, "resumed_seconds": resumed, "steps": steps,
        "all_steps_seconds": whole, "megabytes": peak - before, "process_peak_megabytes": peak,
    }  # fmt: skip


def photographs(folder: Path, width: int, height: int, samples: int) -> str:
    """Write shards of JPEGs, random rotations and crops of scikit-learn's two photographs, with simple captions."""
    folder = folder / f"{width}x{height}_{samples}"
    pattern = str(folder / f"{{00000..{SHARDS - 1:05d}}}.tar")
    if folder.exists():
        return pattern
    from sklearn.datasets import load_sample_images

    sources = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    words = (
        "a", "photo", "of", "the", "old", "red", "temple", "under", "grey", "sky", "with", "flowers", "and", "people",
    )  # fmt: skip
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        with tarfile.open(part / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard * samples // SHARDS, (shard + 1) * samples // SHARDS):
                side = random.uniform(0.6, 0.9)
                left, top = random.uniform(0, 1 - side) * 640, random.uniform(0, 1 - side) * 427
                box = (left, top, left + side * 640, top + side * 427)
                rotated = sources[number % 2].rotate(random.uniform(-3, 3), Image.Resampling.BICUBIC)
                image = rotated.resize((width, height), Image.Resampling.BICUBIC, box)
                caption = " ".join(random.choice(words, random.integers(5, 20)))
                add_sample(archive, number, image, caption, quality=95)
    part.rename(folder)
    return pattern


def add_sample(
    archive: tarfile.TarFile, number: int, image: Image.Image, caption: str, quality: int = 75, extension: str = "txt"
) -> None:
    """Add a JPEG and its caption to a shard. extension: of the caption."""
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=quality)
    for kind, content in (("jpg", jpeg.getvalue()), (extension, caption.encode())):
        entry = tarfile.TarInfo(f"{number:06d}.{kind}")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
