"""Training speed compared with open_clip's own training program: same weights, shards, batch, precision, machine.

    python scripts/benchmark.py training --shards 'data/demo/train/{00000..00003}.tar' --rounds 3

With --captions cc3m the shards' captions are replaced by random words, with the lengths of CC3M's captions in 77
positions:

    python scripts/benchmark.py training --captions cc3m --batch 256 --steps 21

open_clip's main branch takes a turn too, from a checkout of it, plain, with captions padded to the longest of a batch
and sorted by length, and compiled:

    python scripts/benchmark.py training --main ../open_clip/src --captions cc3m --batch 256 --steps 16

All programs run as a user runs them, in turn. Of each run the steps between the first and the last log line after
--warmup count: samples per second, and per CPU second of the program and its loader processes, which other jobs on the
machine change little. The ratios are those of the medians over the rounds. open_clip 3.3.0 needs an older webdataset
(and pandas), which `make bench` puts into .peer without touching the environment.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import PEER, ROOT, cpu_seconds, log, medians, publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count

WORDS = [
    "the", "a", "of", "in", "on", "and", "with", "man", "woman", "dog", "cat", "house", "tree", "car", "street",
    "water", "sky", "beach", "city", "room",
]  # fmt: skip
"""Words of one token each."""


EVERY = 5
"""Steps between two log lines."""
VARIABLE = ["--length-bucketing"]
MAIN: dict[str, list[str]] = {
    "open_clip main": [],
    "open_clip main, variable text": VARIABLE,
    "open_clip main, variable text, compiled": [*VARIABLE, "--text-pad-multiple", "16", "--torchcompile"],
}
"""Flags of the contenders of open_clip's main branch. Variable text: captions padded to the longest of a batch."""


SHARED = {"rounds": 3, "batch": 64, "steps": 40, "threads": 1, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--shards", default="data/demo/train/{00000..00003}.tar")
    parser.add_argument("--captions", choices=["own", "cc3m"], default="own", help="of the shards; of CC3M's lengths")
    parser.add_argument("--main", type=Path, help="folder with the packages of open_clip's main branch")
    parser.add_argument("--warmup", type=number_in(Count), default=4, help="steps that do not count")


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(options, Path(scratch))
    publish(options, result)


def compare(options: argparse.Namespace, scratch: Path) -> dict:
    """Interleaved rounds of all programs -> readings, medians and their ratios to clipzoo's."""
    if options.captions == "cc3m":
        options.shards = with_cc3m_lengths(options.shards, scratch / "shards")
    write_initial_weights(options, scratch / "model")
    if options.main:
        with_variable_text(scratch / "model", scratch / "variable")
    readings: dict[str, dict[str, list[float]]] = {"samples_per_second": {}, "samples_per_cpu_second": {}}
    for _ in range(options.rounds):
        for name in ("clipzoo", "open_clip", *(MAIN if options.main else [])):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                if name == "clipzoo":
                    command = [sys.executable, str(ROOT / "train.py"), *our_overrides(options, Path(folder))]
                else:
                    flags = MAIN.get(name, [])
                    model = scratch / ("variable" if VARIABLE[0] in flags else "model")
                    command = [*open_clip_command(options, Path(folder), model), *flags]
                (first, wall, cpu), (last, wall_end, cpu_end) = logged_steps(command, options, name in MAIN)
            samples = (last - first) * options.batch
            readings["samples_per_second"].setdefault(name, []).append(samples / (wall_end - wall))
            readings["samples_per_cpu_second"].setdefault(name, []).append(samples / (cpu_end - cpu))
            log(name, {measure: round(values[name][-1], 2) for measure, values in readings.items()})
    middle = {measure: medians(values) for measure, values in readings.items()}
    ratios = {
        measure: {name: values["clipzoo"] / value for name, value in values.items()}
        for measure, values in middle.items()
    }
    settings = {key: getattr(options, key) for key in ("encoder", "captions", "batch")}
    sizes = {key: getattr(options, key) for key in ("threads", "workers", "steps")}
    git = ["git", "-C", str(options.main), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if options.main else None
    return {
        "what": "training", **settings, "precision": "float32", **sizes, "main": commit, "readings": readings,
        "medians": middle, "clipzoo_over": ratios,
    }  # fmt: skip


def logged_steps(
    command: Sequence[str], options: argparse.Namespace, main: bool = False
) -> tuple[tuple[int, float, float], tuple[int, float, float]]:
    """Run a training -> the first and the last logged step after --warmup: step, wall-clock time, CPU seconds."""
    path = [str(PEER)] if "open_clip_train.main" in command else []
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join([*([str(options.main.resolve())] if main else []), *path]),
        "OMP_NUM_THREADS": str(options.threads), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    points: list[tuple[int, float, float]] = []
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            # "step 5/40" of clipzoo; open_clip counts samples, "[ 320/2560 ".
            if match := re.search(r"step (\d+)/|\[ *(\d+)/\d+ ", line):
                step = int(match[1] or int(match[2]) // options.batch)
                points.append((step, time.perf_counter(), cpu_seconds(process.pid)))
    chosen = [point for point in points if options.warmup <= point[0] <= options.steps]
    if process.returncode or len(chosen) < 2:
        raise SystemExit(f"{' '.join(command)} failed or printed too few steps:\n{''.join(lines)[-3000:]}")
    return chosen[0], chosen[-1]


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


def with_variable_text(model: Path, folder: Path) -> None:
    """Copy a model, with captions padded to the longest of a batch; Hugging Face's tokenizer with CLIP's vocabulary."""
    from clipzoo.data.tokenizer import ClipTokenizer
    from clipzoo.exports.files import tokenizer_files

    shutil.copytree(model, folder)
    file = folder / "open_clip_config.json"
    config = json.loads(file.read_text())
    text = config["model_cfg"]["text_cfg"]
    text |= {"variable_text": True, "hf_tokenizer_name": "tokenizer.json", "pad_id": 0}
    file.write_text(json.dumps(config))
    tokenizer, settings = tokenizer_files(ClipTokenizer(text["context_length"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def our_overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"encoder={options.encoder}", "head=clip", "objective=infonce", f"data.shards='{options.shards}'",
        "data.crop_scale=[0.9,1.0]", f"data.workers={options.workers}", f"trainer.global_batch={options.batch}",
        f"trainer.steps={options.steps}", "trainer.epochs=null", "trainer.precision=float32",
        f"trainer.log_every={EVERY}", "trainer.checkpoints.every=100000", "optim.schedule.warmup_epochs=null",
        "optim.schedule.warmup_steps=10", "optim.schedule.start=0.0", f"runs={folder}", "name=run",
        *(["encoder.context_length=77"] if options.captions == "cc3m" else []),
    ]  # fmt: skip


def open_clip_command(options: argparse.Namespace, folder: Path, weights: Path) -> list[str]:
    """Return the command line of open_clip's own training program."""
    return [
        sys.executable, "-m", "open_clip_train.main", "--model", f"local-dir:{weights}", "--train-data", options.shards,
        "--dataset-type", "webdataset", "--train-num-samples", str(options.steps * options.batch),
        "--batch-size", str(options.batch), "--workers", str(options.workers), "--precision", "fp32", "--epochs", "1",
        "--warmup", "10", "--lr", "5e-4", "--wd", "0.5", "--beta2", "0.98", "--eps", "1e-8", "--device", "cpu",
        "--log-every-n-steps", str(EVERY), "--logs", str(folder), "--name", "run", "--save-frequency", "0",
        "--dataset-resampled",
    ]  # fmt: skip
