"""Dataset of image-caption pairs in WebDataset shards: every sample once an epoch, in an order set by the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from clipzoo.config.schema import checked
from clipzoo.config.vocabulary import (
    Ascending,
    CaptionKeys,
    Count,
    Gigabytes,
    Pixels,
    Probability,
    Range,
    Share,
    Side,
    TableFormat,
    Workers,
)
from clipzoo.data.base import Dataset
from clipzoo.data.captions import CaptionCounts, StoredSample, caption_keys, chosen, digest, fitted
from clipzoo.data.faults import BadSampleError, Fault, FaultLog
from clipzoo.data.images import WHOLE, ImageTransform, Region, read_header
from clipzoo.data.index import ShardIndex, check_shards, extent, index_folders, load_or_build
from clipzoo.data.loader import iterate
from clipzoo.data.locations import ShardCache
from clipzoo.data.plan import UNIT, Counts, Ids, Nodes, Plan, Weights, first_ids, generator
from clipzoo.data.reader import Prefetcher, ShardReader
from clipzoo.data.tables.formats import JoinedTable, Rules, TableRules
from clipzoo.data.tables.selection import WEIGHT_FILES, Selection, fingerprint, names_in, select, weigh, weights_digest
from clipzoo.data.tar import TarRules
from clipzoo.data.tokenizer import Tokenizer, caption_lengths, trim_padding
from clipzoo.distributed.launch import loader_workers, say
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.weights import recorded
from clipzoo.types import Batch, Part, Views, World

Locations = str | list[str] | list[dict[str, str | float | list[str]]]
Operations = Annotated[int, Range(at_least=0, at_most=100)]
Magnitude = Annotated[int, Range(at_least=0, at_most=10)]
_MOST_CANDIDATES = 64
Loaded = TypeVar("Loaded")


@checked
class ShardDataset(Part, Dataset):
    """Batches of image-caption pairs from WebDataset shards.

    shards: a path, pattern or URL, a list of them, or a list of {path, weight}; see `locations.parse_sources`.
    tokenizer: captions -> token ids.
    image_size: side S of the square crops in pixels.
    crop_scale: smallest and largest fraction of an image's area in a crop.
    interpolation: method for resizing a crop.
    flip: probability of a horizontal flip.
    rand_augment: number of operations, and magnitude from 0 to 10; None turns RandAugment off.
    decode: "exact" decodes every pixel; "fast" lets the JPEG decoder scale down by 2, 4 or 8 where the crop stays
        larger than image_size.
    max_pixels: larger images count as unusable.
    caption_key: key of the .json that holds the caption or captions; None for the .txt. With a list of keys, in which
        ".txt" is the .txt, a sample has the captions of all keys; with {key: probability} captions are drawn by these
        probabilities.
    shuffle_window: number of shards whose samples are shuffled together.
    max_bad_fraction: fraction of unusable samples above which training stops.
    workers: decoding processes of each rank; 0 decodes in the training process, "auto" is as many as the cores allow.
    prefetch: batches that each worker prepares ahead.
    index_folder: folder of the index; None for the shards' folder, or for the run directory if that is read-only.
    cache_folder, cache_gigabytes: local copies of remote shards, at least two windows; see `locations.ShardCache`.
    views: numbers of captions, hard negatives, regions and further crops of each sample in a batch. The images of the
        regions are the first further crops, the others are crops of the whole image.
    hard_key: key of the .json that holds the hard negative captions.
    box_key: key of the .json that holds regions, [[caption, left, top, right, bottom], ...] in shares of the image.
    group_key: key of the .json that holds the group of a sample, a string or a number; None for no groups.
    path: tables or image folders in place of shards, with the same syntax; a key is then the name of a column.
    format, image_key, uid_key, image_folder: see `TableRules`; uid_key is also the key of the .json.
    where, uids, duplicates, fraction, selection_seed: samples that are left out before training; see `Selection`.
    caption_table: table whose columns are further keys, joined by uid. long_captions: see `captions.fitted`; None cuts
        captions that do not fit into the context, without counting them.
    weights: expected number of times that a sample is seen in an epoch; see `selection.weigh`.
    grow: a resumed run takes the samples that were appended to its sources from the next epoch on; see `Plan`.
    locality: "node" gives the rows of a batch to ranks such that a node reads only its part of every shard, see
        `plan.Nodes`; "none" gives every rank consecutive rows.
    """

    def __init__(
        self,
        shards: Locations | None,
        tokenizer: Tokenizer,
        image_size: Side,
        crop_scale: Annotated[tuple[Share, Share], Ascending()],
        interpolation: Literal["bicubic", "bilinear"],
        flip: Probability,
        rand_augment: tuple[Operations, Magnitude] | None,
        decode: Literal["exact", "fast"],
        max_pixels: Pixels,
        caption_key: CaptionKeys | None,
        shuffle_window: Count,
        max_bad_fraction: Probability,
        workers: Literal["auto"] | Workers,
        prefetch: Annotated[int, Range(at_least=1, at_most=1024)],
        index_folder: str | None,
        cache_folder: str | None,
        cache_gigabytes: Gigabytes,
        views: Views = Views(),
        hard_key: str | None = None,
        box_key: str | None = None,
        group_key: str | None = None,
        path: Locations | None = None,
        format: TableFormat | None = None,
        image_key: str | None = None,
        uid_key: str | None = None,
        image_folder: str | None = None,
        where: str | None = None,
        uids: str | None = None,
        duplicates: Literal["image", "pair", "near"] | None = None,
        fraction: Share | None = None,
        selection_seed: int | None = None,
        caption_table: str | None = None,
        long_captions: Literal["truncate", "window", "sentences"] | None = None,
        locality: Literal["none", "node"] = "none",
        weights: str | None = None,
        grow: bool = False,
    ) -> None:
        if views.hard and hard_key is None:
            raise ConfigError(f"data.views.hard={views.hard} needs data.hard_key, the key of the hard negatives")
        if views.boxes and box_key is None:
            raise ConfigError(f"data.views.boxes={views.boxes} needs data.box_key, the key of the regions")
        if caption_key is not None and not caption_key:
            raise ConfigError(f"data.caption_key={caption_key!r} names no key")
        if isinstance(caption_key, Mapping):
            shares = caption_key.values()
            if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
                message = f"the probabilities must be above 0 and sum to 1, not to {sum(shares):g}"
                raise ConfigError(f"data.caption_key={dict(caption_key)}: {message}")
        self._rules: Rules = TarRules(caption_key, uid_key)
        if path is not None:
            further = (hard_key, box_key, group_key, weights, *names_in(where or ""))
            keys = tuple(key for key in further if key is not None)
            self._rules = TableRules(format, image_key, caption_key, uid_key, image_folder, keys)
        if (places := shards if path is None else path) is None or None not in (shards, path):
            raise ConfigError(f"data.shards is {shards} and data.path {path}: give one of them (tables: data=table)")
        self._sources = self._rules.sources(places)
        if locality == "node":
            if path is not None:
                raise ConfigError("data.locality=node reads parts of tars, not of data.path: set data.locality=none")
            if pipes := [name for source in self._sources for name in source.shards if name.startswith("pipe:")]:
                reason = "the output of a command has no parts: set data.locality=none, or give URLs or files"
                raise ConfigError(f"data.locality=node, but data.shards holds {pipes[0]}: {reason}")
        self._tokenizer = tokenizer
        # Plain tuples, because Hydra's lists are slow to index.
        scale = crop_scale[0], crop_scale[1]
        augment = (rand_augment[0], rand_augment[1]) if rand_augment else None
        self._transform = ImageTransform(image_size, scale, interpolation, flip, augment, decode, max_pixels)
        self.views, self._caption_key, self._hard_key = views, caption_key, hard_key
        self._box_key, self._group_key = box_key, group_key
        self._window = shuffle_window
        self._max_bad_fraction = max_bad_fraction
        self.workers, self._prefetch = workers, prefetch
        self._index_folder = index_folder
        self._cache = ShardCache(cache_folder, cache_gigabytes)
        self._run: Path | None = None
        self._indexes: list[ShardIndex] = []
        self._selection = Selection(where, uids, duplicates, fraction, selection_seed, uid_key)
        self._caption_table, self._uid_key, self._long_captions = caption_table, uid_key, long_captions
        self._joined: JoinedTable | None = None
        if grow and fraction is not None:
            raise ConfigError(f"data.grow=true and data.fraction={fraction}: a fraction of more samples has other ones")
        if grow and weights is not None:
            raise ConfigError("data.grow=true and data.weights: the weights of an epoch are those of one dataset")
        self._weights, self._of_samples = weights, list[Weights]()
        self._grow, self._history = grow, list[dict[str, Any]]()
        self._divided = locality == "node"
        self._nodes: Nodes | None = None
        self._stored_keys: Callable[[Tensor], Tensor] | None = None
        self.samples = 0

    def open(self, cache: Path | None, world: World) -> None:
        """Load the index. The first rank builds it if needed, next to the shards or under `cache`, the run directory.

        Raises ConfigError if damaged shards lack too many samples, the ranks see different shards, or the samples of a
        run that grows are not the first ones of each source. Collective.
        """
        self._run = cache
        for key, file in (("uids", self._selection.uids), ("weights", self._weights)):
            if file and (key == "uids" or Path(file).suffix in WEIGHT_FILES) and not Path(file).is_file():
                raise ConfigError(f"data.{key}={file} is not a file")
        if self._caption_table is not None:
            keys = [key for key in (*caption_keys(self._caption_key), self._hard_key) if key is not None]
            self._joined = JoinedTable(self._caption_table, keys, self._uid_key, self._cache)
            self._rules = replace(self._rules, joined=self._joined.columns)

        nodes = Nodes(world.nodes(), world.rank) if self._divided else None
        self._nodes = None if nodes is None or nodes.count == 1 else nodes
        self._reader = ShardReader(self._cache, self._rules, self._joined, self._nodes)
        plain = ShardReader(self._cache, self._rules)
        folders = [index_folders(source.shards, self._index_folder, cache) for source in self._sources]

        def load(check: bool) -> tuple[list[ShardIndex], list[Fault]]:
            indexes = [
                load_or_build(source.shards, self._cache, places, rules=self._rules)
                for source, places in zip(self._sources, folders, strict=True)
            ]
            faults = check_shards(indexes, self._max_bad_fraction, self._rules.setting) if check else []
            return list(map(partial(select, self._selection, plain), indexes, folders)), faults

        self._indexes, faults = world.run_on_first(partial(load, check=True))
        # A node with its own copies of shards and index has to build its own index.
        if not all(index.data.is_file() for index in self._indexes):
            self._indexes, _ = load(check=False)
        if self._weights is not None:
            weighed = partial(weigh, self._weights, plain)
            world.run_on_first(lambda: len(list(map(weighed, self._indexes, folders))))
            self._of_samples = list(map(weighed, self._indexes, folders))
            for (units, _, passes), rows in ((of_source, of_source.rows) for of_source in self._of_samples):
                say(
                    f"data: weights above 0 of {np.count_nonzero(units):,} of {number_of(len(units), 'sample')}, "
                    f"the largest {units.max() * passes / UNIT:.6g}: {number_of(rows * passes, 'row')} an epoch"
                    f"{f' in {passes} passes' if passes > 1 else ''}"
                )
        checkpoints = (cache or Path()) / "checkpoints"
        of_run = lambda: (recorded(checkpoints, "data", list), recorded(checkpoints, "step", int))  # noqa: E731
        history, step = world.run_on_first(of_run)
        joined = self._joined.digest if self._joined else None
        settings = [[source.weight, self._window, joined] for source in self._sources]
        pairs = list(zip(self._indexes, settings, strict=True))
        order = self._window, joined, weights_digest(self._weights)
        now: dict[str, Any] = {
            "step": 0, "samples": sum(index.samples for index in self._indexes),
            "fingerprint": fingerprint(self._indexes, self._sources, *order),
            "sources": [extent(*pair, len(pair[0].shards), pair[0].samples) for pair in pairs],
        }  # fmt: skip
        self._history = history if self._grow and history else [now]
        if (before := self._history[-1])["sources"] != now["sources"]:
            known = list(zip(pairs, before["sources"], strict=False))
            whole = len(pairs) == 1 or all(start[2] in index.starts for (index, _), start in known)
            if not whole or [extent(*pair, *start[1:3]) for pair, start in known] != before["sources"]:
                raise ConfigError(
                    f"data.grow=true: the {number_of(before['samples'], 'sample')} of the run are not the first ones "
                    "of each source of data.shards: append new shards after all others, and rows only to the last "
                    "table of a single source, and leave data.caption_table as it is; or pass name=NEW to start "
                    "another run"
                )
            say(
                f"data: {now['samples'] - before['samples']:,} samples were appended to {before['samples']:,}; "
                f"training takes them from the first epoch on that begins after step {step}"
            )
            self._history = [*self._history, {**now, "step": step}]
        if len(set(world.gather_object(self._history[-1]["fingerprint"]))) > 1:
            raise ConfigError("data.shards: the ranks see different shards; give all nodes the same files")
        self.samples = self._history[-1]["samples"]
        # First id, source, number and size of all shards in the order of their ids.
        shards = [
            np.stack([ids, np.full(len(ids), source), np.arange(len(ids)), self._indexes[source].counts])
            for source, ids in enumerate(first_ids(list(map(self._counts, self._history))))
        ]
        table = np.concatenate(shards, axis=1)
        self._table = table[:, np.argsort(table[0], kind="stable")]
        self._faults = FaultLog(self.samples, self._max_bad_fraction)
        if world.is_first:
            self._open_fault_log(world)
            self._faults.record(0, faults)

    @property
    def fingerprint(self) -> str:
        return str(self._history[0]["fingerprint"])

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._history

    @property
    def epoch_rows(self) -> int:
        rows = [weighted.passes * weighted.rows for weighted in self._of_samples]
        return sum(rows) if rows else int(self._history[0]["samples"])

    def repeats(self, view: Literal["image", "text"]) -> bool:
        # Replacements of unusable samples are rare exceptions.
        transform = self._transform
        if view == "text":
            return self.views.texts == 1
        is_fixed = transform.crop_scale == (1, 1) and transform.flip == 0 and transform.rand_augment is None
        return is_fixed and self.views.images == 1

    def leave_out_images(self, stored_keys: Callable[[Tensor], Tensor]) -> None:
        self._stored_keys = stored_keys

    def shards(self) -> list[tuple[str, str, int]]:
        shards = [self._indexes[source].shards[number] for _, source, number, _ in self._table.T.tolist()]
        return [(shard.name, shard.digest, shard.count) for shard in shards]

    def captions(self) -> CaptionCounts:
        """Return how often captions repeat over all sources, regardless of their weights. Reads only the index."""
        if len(self._indexes) == 1:
            return self._indexes[0].captions
        return CaptionCounts.of(np.concatenate([index.records["caption"] for index in self._indexes]))

    def counters(self) -> dict[str, int]:
        return dict(self._faults.counts)

    def check(self, seed: int, global_batch: int) -> None:
        self._plan(seed, global_batch)

    def batches(
        self, *, seed: int, global_batch: int, world: World, start_step: int, stop_step: int, trim_text: bool
    ) -> Iterator[Batch]:
        """Yield batches. Raises ConfigError once more than max_bad_fraction of the samples were replaced."""
        rows = rank_rows(global_batch, world)
        self._open_fault_log(world)
        plan = self._plan(seed, global_batch)
        compute = partial(self._rank_batch, plan, partial(self.read, seed), rows, trim_text)
        # Loads the vocabulary before the fork, so that the workers share it.
        self._tokenizer([""])
        workers = loader_workers(world.device.type == "cuda", self.workers)
        items = iterate(compute, range(start_step, stop_step), workers, self._prefetch, world.timeout, "data.workers")
        # Starts its threads after the fork: a process forked among threads inherits the locks that they hold.
        prefetcher = Prefetcher(plan, self._indexes, self._reader)
        prefetcher.advance(start_step)
        try:
            for step, (batch, faults) in enumerate(items, start_step):
                self._faults.record(len(batch), faults)
                prefetcher.advance(step)
                yield batch
        finally:
            items.close()
            prefetcher.close()

    def _rank_batch(
        self, plan: Plan, read: Callable[..., Sample], rows: slice | Ids, trim_text: bool, step: int
    ) -> tuple[Batch, list[Fault]]:
        """Return this rank's share of a step, the rows `rows` of the global batch, and its faults."""
        global_rows = plan.rows(step)
        if self._nodes is not None:
            first, _, shards, counts = self._shards_of(global_rows.sample_id)
            rows = self._nodes.rows(self._nodes.owners(shards, global_rows.sample_id - first, counts))
            self._reader.fetch(map(self._locate, global_rows.sample_id[rows].tolist()))
        ids, epochs = torch.from_numpy(global_rows.sample_id[rows].copy()), global_rows.epoch[rows].tolist()
        stored_keys = [None] * len(ids) if self._stored_keys is None else self._stored_keys(ids).tolist()
        size, views = self._transform.image_size, self.views
        shape = (len(ids), *([views.images] if views.crops else []), 3, size, size)
        # A batch whose images are all black, because their features are stored, takes no memory for them.
        images = torch.zeros(1, dtype=torch.uint8).expand(shape)
        samples, faults = list[Sample](), list[Fault]()
        for position, request in enumerate(zip(ids.tolist(), epochs, stored_keys, strict=True)):
            sample = read(*request)
            if sample.image is not None:
                if not images.is_contiguous():
                    images = images.contiguous()
                images[position] = sample.image
            samples.append(sample)
            faults += sample.faults
        captions = [caption for sample in samples for caption in sample.texts]
        text, lengths = self._tokenizer(captions), None
        if trim_text:
            lengths = caption_lengths(text, self._tokenizer.end_token)
            text = trim_padding(text, self._tokenizer.end_token)
        keys = _as_tensor(map(digest, captions))
        if views.texts > 1:
            # [b K, ...] -> [b, K, ...]
            text, keys = (flat.unflatten(0, (len(ids), views.texts)) for flat in (text, keys))
            lengths = None if lengths is None else lengths.unflatten(0, (len(ids), views.texts))
        group = None if self._group_key is None else _as_tensor(sample.group for sample in samples)
        image_keys = None if self._stored_keys is None else torch.tensor([sample.image_key for sample in samples])
        return Batch(images, text, ids, image_keys, lengths, keys, group, views), faults

    def examples(self, sample_ids: Sequence[int]) -> list[tuple[Tensor, str]]:
        """Image (uint8 [3, S, S]) and caption of each sample, as in the first epoch with seed 0."""
        samples = [self.read(0, sample_id, epoch=0) for sample_id in sample_ids]
        images = [(sample.image, sample.texts[0]) for sample in samples if sample.image is not None]
        return [(image[0] if self.views.crops else image, text) for image, text in images]

    def whole(self, sample_ids: Sequence[int]) -> list[tuple[Image, list[str]]]:
        """Return the whole image and all captions, hard negatives and captions of regions of each sample."""

        def load(source: StoredSample) -> tuple[Image, list[str]]:
            texts = source.captions(self._caption_key)[0]
            texts += [] if self._hard_key is None else source.texts(self._hard_key, "hard")
            texts += [] if self._box_key is None else [text for text, _ in source.regions(self._box_key)]
            return fromarray(read_header(source.image(), self._transform.max_pixels).decode(1)), texts

        return [self._first_usable(sample_id, load)[0] for sample_id in sample_ids]

    def names(self, sample_ids: Sequence[int]) -> list[str]:
        return [" ".join(_name(*self._locate(sample_id))) for sample_id in sample_ids]

    def read(self, seed: int, sample_id: int, epoch: int, stored_key: int | None = None) -> Sample:
        """Return a sample or its replacement: a pure function of the arguments. stored_key: see `ImageTransform`."""
        views = self.views
        # Random choices depend on `sample_id`, also if another sample is read in its place.
        random = partial(generator, seed=seed, epoch=epoch, index=sample_id)

        def load(source: StoredSample) -> tuple[Sample, dict[str, str]]:
            notes: dict[str, str] = {}
            boxes: list[tuple[str, Region]] = []
            captions, probabilities = source.captions(self._caption_key)
            texts = chosen("caption", captions, views.captions, random, notes, probabilities)
            if views.hard:
                texts += chosen("hard", source.texts(self._hard_key, "hard"), views.hard, random, notes)
            if views.boxes and self._box_key:
                boxes = chosen("box", source.regions(self._box_key), views.boxes, random, notes)
                texts += [text for text, _ in boxes]
            for number, text in enumerate(texts) if self._long_captions else ():
                draw = random("caption", draw=number + 1)
                texts[number], is_long = fitted(text, self._tokenizer, str(self._long_captions), draw)
                if is_long:
                    notes["long_caption"] = f"does not fit into {self._tokenizer.context_length} tokens"
            group = 0 if self._group_key is None else source.group(self._group_key)
            regions = [region for _, region in boxes[: views.crops]] + [WHOLE] * (views.crops - views.boxes)
            further = [(random("augment", draw=draw), region) for draw, region in enumerate(regions, 1)]
            image, conversions, key = self._transform(source.image(), random("augment"), stored_key, further)
            return Sample(image, key, texts, group, []), notes | dict.fromkeys(conversions, "converted to plain RGB")

        (sample, notes), place, failure = self._first_usable(sample_id, load)
        if failure or notes:
            name = _name(*place)
            sample.faults.extend(Fault(sample_id, *name, kind, reason, None) for kind, reason in notes.items())
        if failure:
            own_name = _name(*self._locate(sample_id))
            sample.faults.append(Fault(sample_id, *own_name, failure.kind, failure.reason, " ".join(name)))
        return sample

    def _first_usable(
        self, sample_id: int, load: Callable[[StoredSample], Loaded]
    ) -> tuple[Loaded, tuple[ShardIndex, int, int], BadSampleError | None]:
        """Load a sample, or the next usable one after it in its shard (cyclically), then in the next shards.

        Returns also index, shard and position of the sample that was loaded, and the fault of the one that was asked
        for. Raises ConfigError if none of the candidates is usable.
        """
        index, shard, position = self._locate(sample_id)
        counts = index.counts
        failure: BadSampleError | None = None
        in_shard = ((shard, (position + step) % counts[shard]) for step in range(min(counts[shard], _MOST_CANDIDATES)))
        # In other shards the position stays the same, so that the samples of a lost shard have different replacements.
        others = ((shard + step) % len(counts) for step in range(1, min(len(counts), _MOST_CANDIDATES)))
        in_others = ((other, position % counts[other]) for other in others if counts[other])
        for candidate in chain(in_shard, in_others):
            try:
                return load(self._reader.sample(index, *candidate)), (index, *candidate), failure
            except BadSampleError as error:
                failure = failure or error
        assert failure is not None
        keys = "data.path, data.image_key, data.image_folder" if self._rules.is_table else "data.shards"
        raise ConfigError(
            f"{self.names([sample_id])[0]} cannot be used ({failure.reason}), nor any of the samples that follow "
            f"it: check {keys} and data.caption_key"
        )

    def _locate(self, sample_id: int) -> tuple[ShardIndex, int, int]:
        """Return the index that holds a sample, its shard, and its position in the shard."""
        first, source, shard, _ = self._shards_of(sample_id).tolist()
        return self._indexes[source], shard, sample_id - first

    def _shards_of(self, sample_ids: int | Ids) -> Ids:
        """Return the columns of `_table` for the shards of samples, [4] or [4, k]."""
        return self._table[:, self._table[0].searchsorted(sample_ids, side="right") - 1]

    def _plan(self, seed: int, global_batch: int) -> Plan:
        weights, (start, *growth) = [source.weight for source in self._sources], self._history
        stages = [(stage["step"], self._counts(stage)) for stage in growth]
        return Plan(self._counts(start), weights, seed, self._window, global_batch, stages, self._of_samples)

    def _counts(self, stage: Mapping[str, Any]) -> Counts:
        """Return the numbers of samples of the shards of every source at some time of the run."""
        extents = zip(self._indexes, stage["sources"], strict=False)
        return [np.diff(index.starts[: shards + 1].clip(max=samples)) for index, (_, shards, samples, _) in extents]

    def _open_fault_log(self, world: World) -> None:
        if self._run is not None:
            self._faults.write_to(self._run / f"bad_samples.rank{world.rank}.jsonl")


def rank_rows(global_batch: int, world: World) -> slice:
    """Return this rank's rows of a global batch. Raises ConfigError if it cannot be divided evenly among the ranks."""
    if global_batch % world.size:
        raise ConfigError(
            f"trainer.global_batch {global_batch} cannot be divided among {number_of(world.size, 'rank')}"
        )
    size = global_batch // world.size
    return slice(world.rank * size, (world.rank + 1) * size)


def _as_tensor(digests: Iterable[int]) -> Tensor:
    """Return digests below 2^64 as int64, [n]."""
    return torch.from_numpy(np.fromiter(digests, np.uint64).view(np.int64))


class Sample(NamedTuple):
    """A sample as it is read.

    image: uint8 [3, S, S], or [1 + crops, 3, S, S] with further crops; None if its features are stored.
    image_key: see `ImageTransform`. texts: captions, hard negatives and captions of regions, in this order.
    group: digest of the group, 0 without one. faults: replacement, conversions, and texts that were repeated.
    """

    image: Tensor | None
    image_key: int
    texts: list[str]
    group: int
    faults: list[Fault]


def _name(index: ShardIndex, shard: int, position: int) -> tuple[str, str]:
    return index.locations[shard], index.keys(shard)[position]
