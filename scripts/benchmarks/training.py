"""Training speed compared with open_clip's own training program: same weights, shards, batch, precision, machine.

    python scripts/benchmark.py training --shards 'data/demo/train/{00000..00003}.tar' --rounds 3

With --captions cc3m the shards' captions are replaced by random words, with the lengths of CC3M's captions in 77
positions:

    python scripts/benchmark.py training --captions cc3m --batch 256 --steps 21

Both programs run as a user runs them, in turn; of each run the median of its own samples/s
readings counts, without the first; the ratio is that of the medians over the rounds. The peer needs an older webdataset
(and pandas), which `make bench` puts into .peer without touching the environment.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import PEER, ROOT, in_turn, medians, publish
from clipzoo.cli.arguments import Parser

WORDS = [
    "the", "a", "of", "in", "on", "and", "with", "man", "woman", "dog", "cat", "house", "tree", "car", "street",
    "water", "sky", "beach", "city", "room",
]  # fmt: skip
"""Words of one token each."""


SHARED = {"rounds": 3, "batch": 64, "steps": 40, "threads": 1, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--shards", default="data/demo/train/{00000..00003}.tar")
    parser.add_argument("--captions", choices=["own", "cc3m"], default="own", help="of the shards; of CC3M's lengths")


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(options, Path(scratch))
    publish(options, result)


def compare(options: argparse.Namespace, scratch: Path) -> dict:
    """Interleaved rounds of both programs -> medians, ranges and their ratio."""
    if options.captions == "cc3m":
        options.shards = with_cc3m_lengths(options.shards, scratch / "shards")
    write_initial_weights(options, scratch / "model")
    runs = {"clipzoo": partial(_clipzoo, options, scratch), "open_clip": partial(_open_clip, options, scratch)}
    readings = in_turn(runs, options.rounds)
    middle = medians(readings)
    settings = {key: getattr(options, key) for key in ("encoder", "captions", "batch")}
    sizes = {key: getattr(options, key) for key in ("threads", "workers", "steps")}
    return {
        "what": "training, samples/s", **settings, "precision": "float32", **sizes, "readings": readings,
        "medians": middle, "ratio": middle["clipzoo"] / middle["open_clip"],
    }  # fmt: skip


def with_cc3m_lengths(shards: str, folder: Path) -> str:
    """Copy shards, with random words for captions. Return the brace pattern of the copies."""
    import torch
    import webdataset

    from benchmarks.captions import caption_lengths

    torch.manual_seed(0)
    folder.mkdir()
    paths = webdataset.shardlists.expand_urls(shards)
    for number, path in enumerate(paths):
        with tarfile.open(path) as source, tarfile.open(folder / f"{number:05}.tar", "w") as copy:
            for member in source:
                content = source.extractfile(member)
                if content is not None and member.name.endswith(".txt"):
                    words = torch.randint(len(WORDS), (int(caption_lengths(1)) - 2,)).tolist()
                    text = " ".join(WORDS[word] for word in words).encode()
                    member.size, content = len(text), io.BytesIO(text)
                copy.addfile(member, content)
    return str(folder / f"{{00000..{len(paths) - 1:05}}}.tar")


def write_initial_weights(options: argparse.Namespace, folder: Path) -> None:
    """The model that both train, as open_clip reads it."""
    import clipzoo
    from clipzoo.build import build_model
    from clipzoo.config.compose import compose

    plain = compose(our_overrides(options, Path("unused")))
    clipzoo.export(clipzoo.LoadedModel(build_model(plain), plain), folder)


def our_overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"encoder={options.encoder}", "head=clip", "objective=infonce", f"data.shards='{options.shards}'",
        "data.crop_scale=[0.9,1.0]", f"data.workers={options.workers}", f"trainer.global_batch={options.batch}",
        f"trainer.steps={options.steps}", "trainer.epochs=null", "trainer.precision=float32", "trainer.log_every=5",
        "trainer.checkpoints.every=100000", "optim.schedule.warmup_epochs=null", "optim.schedule.warmup_steps=10",
        "optim.schedule.start=0.0", f"runs={folder}", "name=run",
        *(["encoder.context_length=77"] if options.captions == "cc3m" else []),
    ]  # fmt: skip


def _clipzoo(options: argparse.Namespace, scratch: Path) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        _run([sys.executable, str(ROOT / "train.py"), *our_overrides(options, Path(runs))], options, {})
        lines = map(json.loads, (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines())
        return statistics.median([line["samples_per_second"] for line in lines if "samples_per_second" in line][1:])


def _open_clip(options: argparse.Namespace, scratch: Path) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as logs:
        output = _run(open_clip_command(options, Path(logs), scratch / "model"), options, {"PYTHONPATH": str(PEER)})
    seconds = [float(number) for number in re.findall(r"Batch \(t\): ([0-9.]+)", output)]
    if len(seconds) < 3:
        raise SystemExit(f"open_clip's training printed no readings:\n{output[-3000:]}")
    return statistics.median([options.batch / reading for reading in seconds[1:]])


def open_clip_command(options: argparse.Namespace, folder: Path, weights: Path) -> list[str]:
    """Return the command line of open_clip's own training program."""
    return [
        sys.executable, "-m", "open_clip_train.main", "--model", f"local-dir:{weights}", "--train-data", options.shards,
        "--dataset-type", "webdataset", "--train-num-samples", str(options.steps * options.batch),
        "--batch-size", str(options.batch), "--workers", str(options.workers), "--precision", "fp32", "--epochs", "1",
        "--warmup", "10", "--lr", "5e-4", "--wd", "0.5", "--beta2", "0.98", "--eps", "1e-8", "--device", "cpu",
        "--log-every-n-steps", "5", "--logs", str(folder), "--name", "run", "--save-frequency", "0",
        "--dataset-resampled",
    ]  # fmt: skip


def _run(command: list[str], options: argparse.Namespace, environment: dict[str, str]) -> str:
    threads = {"OMP_NUM_THREADS": str(options.threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **threads, **environment}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr
