"""Image-caption pairs from WebDataset shards: every sample exactly once an epoch, in an order known beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from clipzoo.data.faults import Fault, FaultLog
from clipzoo.data.images.transform import ImageTransform
from clipzoo.data.plan.plan import Plan
from clipzoo.data.rank_batches import RankBatches, rank_rows
from clipzoo.data.samples import SampleReader
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.damage import check_shards
from clipzoo.data.shards.index import FOLDER, ShardIndex
from clipzoo.data.shards.index_builder import load_or_build
from clipzoo.data.shards.locations import is_remote
from clipzoo.data.shards.prefetch import Prefetcher
from clipzoo.data.shards.sources import parse_sources
from clipzoo.data.tokenizer import Tokenizer
from clipzoo.data.workers import iterate
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.types import Batch


class ShardData:
    """Batches of a set of shards.

    shards: see `sources.parse_sources`. tokenizer: captions -> ids. image_size: S of the square crops.
    crop_scale: least and greatest share of an image's area in a crop. flip: probability of a mirror image.
    rand_augment: [operations, magnitude] or null. decode: "exact" decodes every pixel, "fast" lets the JPEG decoder
    scale down by 2, 4 or 8 where the crop stays larger than image_size. max_pixels: larger images are not decoded.
    caption_key: the key of the .json that holds the caption or captions; null for the .txt.
    shuffle_window: samples are shuffled among this many shards at a time. max_bad_fraction: of the samples seen.
    workers: processes that decode, on each rank; 0 decodes in the training process. prefetch: batches a worker
    prepares ahead. index_folder: where the index is kept; null for beside the shards, or else the run's folder.
    cache_folder, cache_gigabytes: of remote shards, see `cache.ShardCache`; it should hold two windows.
    """

    def __init__(
        self,
        shards: str | list[Any],
        tokenizer: Tokenizer,
        image_size: int,
        crop_scale: list[float],
        interpolation: Literal["bicubic", "bilinear"],
        flip: float,
        rand_augment: list[int] | None,
        decode: Literal["exact", "fast"],
        max_pixels: int,
        caption_key: str | None,
        shuffle_window: int,
        max_bad_fraction: float,
        workers: int,
        prefetch: int,
        index_folder: str | None,
        cache_folder: str | None,
        cache_gigabytes: float,
    ) -> None:
        low_and_high = len(crop_scale) == 2 and 0 < crop_scale[0] <= crop_scale[1] <= 1
        _require(low_and_high, "crop_scale", crop_scale, "[low, high], shares of the area")
        _require(not rand_augment or len(rand_augment) == 2, "rand_augment", rand_augment, "[operations, magnitude]")
        _require(0 <= flip <= 1, "flip", flip, "a probability")
        _require(0 <= max_bad_fraction <= 1, "max_bad_fraction", max_bad_fraction, "a fraction")
        _require(shuffle_window >= 1, "shuffle_window", shuffle_window, "at least 1")
        _require(workers >= 0, "workers", workers, "at least 0")
        _require(prefetch >= 1, "prefetch", prefetch, "at least 1")
        self._sources = parse_sources(shards)
        self._tokenizer = tokenizer
        self._transform = ImageTransform(
            image_size,
            list(crop_scale),
            interpolation,
            flip,
            list(rand_augment) if rand_augment else None,
            decode,
            max_pixels,
        )
        self._caption_key = caption_key
        self._window = shuffle_window
        self._max_bad_fraction = max_bad_fraction
        self._workers, self._prefetch = workers, prefetch
        self._index_folder = index_folder
        self._cache = ShardCache(cache_folder, cache_gigabytes)
        self._run: Path | None = None
        self._indexes: list[ShardIndex] = []
        self.samples = 0

    def open(self, cache: Path | None, world: World) -> None:
        """Load the index, or build it on the first rank: beside the shards, or under `cache`, the run's folder."""
        self._run = cache
        indexes, faults = world.run_on_first(self._load_and_check)
        # A node that keeps shards and index on a disk of its own has to build its own index.
        if not all(index.data.is_file() for index in indexes):
            self._indexes = self._load()
        else:
            self._indexes = indexes
        fingerprints = world.gather_object(self.fingerprint)
        if len(set(fingerprints)) > 1:
            raise ConfigError("data.shards: the ranks see different shards; give all nodes the same files")
        self.samples = sum(index.samples for index in self._indexes)
        self._faults = FaultLog(self.samples, self._max_bad_fraction)
        if world.is_first:
            self._open_fault_log(0)
            self._faults.record(0, faults)

    @property
    def fingerprint(self) -> str:
        """Of the shards' names and samples and of their order's arguments: a run resumes only on the same."""
        facts = [(index.fingerprint, source.weight) for index, source in zip(self._indexes, self._sources, strict=True)]
        return hashlib.sha256(repr((facts, self._window)).encode()).hexdigest()

    def counters(self) -> dict[str, int]:
        """Samples that could not be used or had to be converted, by kind, as seen by this rank since it started."""
        return dict(self._faults.counts)

    def check(self, seed: int, global_batch: int) -> None:
        """Raise ConfigError if a batch of this size would hold a sample twice."""
        self._plan(seed, global_batch)

    def _plan(self, seed: int, global_batch: int) -> Plan:
        """The samples of every step."""
        counts = [index.counts.tolist() for index in self._indexes]
        return Plan(counts, [source.weight for source in self._sources], seed, self._window, global_batch)

    def batches(
        self,
        *,
        seed: int,
        global_batch: int,
        world: World,
        start_step: int,
        stop_step: int,
        trim_text: bool,
    ) -> Iterator[Batch]:
        """This rank's rows [rank * b, (rank + 1) * b) of steps start_step .. stop_step - 1, on the CPU.

        trim_text: cut the padding that all captions of the batch share (the width stays a multiple of 8).
        """
        rows = rank_rows(global_batch, world)
        self._open_fault_log(world.rank)
        plan = self._plan(seed, global_batch)
        reader = SampleReader(self._indexes, self._cache, self._transform, self._caption_key, seed)
        dataset = RankBatches(plan, reader, self._tokenizer, rows, trim_text)
        # Loaded before the workers are forked, so that they share the vocabulary.
        self._tokenizer([""])
        items = iterate(dataset, range(start_step, stop_step), self._workers, self._prefetch)
        # The threads start after the fork: a process forked among threads inherits the locks that they hold.
        prefetcher = Prefetcher(plan, self._indexes, self._cache)
        prefetcher.advance(start_step)
        try:
            for step, (batch, faults, error) in enumerate(items, start_step):
                if batch is None:
                    raise ConfigError(str(error))
                self._faults.record(len(batch), faults)
                prefetcher.advance(step)
                yield batch
        finally:
            items.close()
            prefetcher.close()

    def examples(self, sample_ids: Sequence[int]) -> list[tuple[Tensor, str]]:
        """Picture, uint8 [3, S, S], and caption of these samples, as training sees them in its first epoch."""
        reader = SampleReader(self._indexes, self._cache, self._transform, self._caption_key, 0)
        rows = [reader.read(sample_id, 0) for sample_id in sample_ids]
        return [(row.image, row.caption) for row in rows]

    def _open_fault_log(self, rank: int) -> None:
        if self._run is not None:
            self._faults.write_to(self._run / f"bad_samples.rank{rank}.jsonl")

    def _load_and_check(self) -> tuple[list[ShardIndex], list[Fault]]:
        indexes = self._load()
        return indexes, check_shards(indexes, self._max_bad_fraction)

    def _load(self) -> list[ShardIndex]:
        return [load_or_build(source.shards, self._cache, self._folders(source.shards)) for source in self._sources]

    def _folders(self, shards: tuple[str, ...]) -> list[Path]:
        if self._index_folder is not None:
            return [Path(self._index_folder)]
        home = Path(shards[0]).parent
        # A folder that is not there must not come into being because an index wants to lie in it.
        beside = [] if is_remote(shards[0]) or not home.is_dir() else [home / FOLDER]
        return beside + ([self._run / FOLDER] if self._run else [])


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"data.{key} is {value}: it must be {wanted}")
