"""Run one loader, ours or open_clip's, in a process started by the benchmarks `loader` and `epochs`.

    python scripts/benchmarks/loader_process.py '{"side": "open_clip", "task": "speed", ...}'

Task "speed": for every line on stdin, a number of batches, read that many and print the time; for 0 wait until the
workers are idle. Task "ids": read `epochs` epochs of captions such as "number 12" and print the numbers of each epoch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from clipzoo import ConfigError, World
from clipzoo.cli.arguments import run_main

_MANY = 10**9


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        raise ConfigError("the benchmark `loader` starts this program, with its options as JSON")
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    if not options.simplejpeg:
        sys.modules["simplejpeg"] = None  # type: ignore[assignment]
    if options.task == "speed":
        batches = SPEED[options.side](options)
        for line in sys.stdin:
            print(json.dumps(_measure(batches, int(line))), flush=True)
    else:
        for numbers in IDS[options.side](options):
            print(json.dumps(numbers), flush=True)


def _measure(batches: Iterator[Any], count: int) -> dict[str, float]:
    """Return wall-clock seconds, CPU seconds of all processes, and the workers' private memory in bytes.

    count: batches to read; 0 waits until the workers are idle.
    """
    samples = 0
    work, began = _work(), time.perf_counter()
    for _ in range(count):
        samples += len(next(batches)[0])
    before = -1.0
    while count == 0 and (now := _work()) > before + 0.05:
        before = now
        time.sleep(0.5)
    seconds, work = time.perf_counter() - began, _work() - work
    # Private memory: a leak would show here.
    facts = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in _workers())
    kilobytes = sum(map(int, re.findall(r"Private_\w+: +(\d+) kB", facts)))
    return {"samples": samples, "seconds": seconds, "work": work, "worker_bytes": 1024 * kilobytes}


def _workers() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _work() -> float:
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in _workers()]
    return time.process_time() + sum(int(count) for pair in ticks for count in pair) / os.sysconf("SC_CLK_TCK")


def our_data(options: SimpleNamespace, tokenizer: Any) -> Any:
    from clipzoo.data.dataset import ShardDataset
    from clipzoo.data.tables.formats import holds_tables

    tables = holds_tables(options.shards)
    data = ShardDataset(
        None if tables else options.shards, tokenizer, path=options.shards if tables else None,
        image_size=options.image_size, crop_scale=options.crop_scale, decode=options.decode,
        interpolation="bicubic", flip=0.0, rand_augment=None, max_pixels=89_000_000, caption_key=None,
        shuffle_window=64, max_bad_fraction=0.01, workers=options.workers, prefetch=2, index_folder=None,
        cache_folder=None, cache_gigabytes=1.0,
    )  # fmt: skip
    data.open(None, World())
    return data


def _our_batches(options: SimpleNamespace) -> Iterator[Any]:
    from clipzoo.data.tokenizer import ClipTokenizer

    data = our_data(options, ClipTokenizer(77))
    batches = data.batches(
        seed=0, global_batch=options.batch, world=World(), start_step=0, stop_step=_MANY, trim_text=True
    )
    return ((batch.image, batch.text) for batch in batches)


def _our_ids(options: SimpleNamespace) -> Iterator[list[int]]:
    data = our_data(options, _Numbers())
    stream = data.batches(
        seed=options.seed, global_batch=options.batch, world=World(), start_step=0,
        stop_step=-(-options.epochs * data.samples // options.batch), trim_text=False,
    )  # fmt: skip
    numbers = [int(number) for batch in stream for number in batch.text[:, 0]]
    for epoch in range(options.epochs):
        yield numbers[epoch * data.samples : (epoch + 1) * data.samples]


def _their_data(options: SimpleNamespace, tokenizer: Any, samples: int) -> Any:
    from open_clip import image_transform
    from open_clip.transform import AugmentationCfg
    from open_clip_train.data import get_wds_dataset
    from open_clip_train.main import random_seed

    random_seed(options.seed, 0)
    transform = image_transform(
        options.image_size, is_train=True, aug_cfg=AugmentationCfg(scale=tuple(options.crop_scale))
    )
    arguments = SimpleNamespace(
        train_data=options.shards, train_num_samples=samples, train_data_upsampling_factors=None, seed=options.seed,
        dataset_resampled=options.resampled, batch_size=options.batch, workers=options.workers, world_size=1,
    )  # fmt: skip
    return get_wds_dataset(arguments, transform, is_train=True, tokenizer=tokenizer)


def _their_batches(options: SimpleNamespace) -> Iterator[Any]:
    from open_clip import get_tokenizer

    return iter(_their_data(options, get_tokenizer("ViT-B-32"), _MANY).dataloader)


def _their_ids(options: SimpleNamespace) -> Iterator[list[int]]:
    data = _their_data(options, _Numbers(), options.samples)
    for epoch in range(options.epochs):
        data.set_epoch(epoch)
        yield [int(number) for _, text in data.dataloader for number in text[:, 0]]


class _Numbers:
    """ "number 12" -> [12]."""

    context_length = 1
    end_token = -1

    def __call__(self, captions: str | list[str]) -> torch.Tensor:
        captions = [captions] if isinstance(captions, str) else captions
        return torch.tensor([[int((caption or "0").split()[-1])] for caption in captions])


SPEED = {"clipzoo": _our_batches, "open_clip": _their_batches}
IDS = {"clipzoo": _our_ids, "open_clip": _their_ids}


if __name__ == "__main__":
    run_main(main)
