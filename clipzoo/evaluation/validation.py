"""Validation: held-out pairs from shards, and the loss of the run's objective on them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL.Image import Image

from clipzoo.config.vocabulary import CaptionKeys
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import decode
from clipzoo.data.index import ShardIndex, index_folders, load_or_build
from clipzoo.data.locations import ShardCache, is_remote, piece
from clipzoo.data.reader import ShardReader
from clipzoo.data.tables.formats import TableRules, holds_tables
from clipzoo.data.tar import TarRules
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import Images, RetrievalDataset, version_of
from clipzoo.evaluation.scoring import exact_products
from clipzoo.heads.pairs import Scope
from clipzoo.heads.scores import automatic_tile
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.runs.record import VALIDATION
from clipzoo.types import Embedding, Progress

CACHE_GIGABYTES = 50.0


@dataclass(frozen=True)
class HeldOutLoss:
    """Value of the training objective on held-out pairs, in batches of the run's global batch size N.

    The loss of most objectives grows with N. Batches are drawn without replacement from a fixed seed; pairs that do not
    fill the last batch are left out. Fewer than N pairs are one batch, whose loss is not comparable with training.
    """

    objective: Objective
    progress: Progress
    global_batch: int

    @property
    def key(self) -> str:
        """Cache key over the parameters and the global state of the objective, and the progress."""
        per_sample = self.objective.initial_state(0)
        state = {
            name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest()
            for name, value in self.objective.state_dict().items()
            if name not in per_sample
        }
        return hashlib.sha256(repr((self.objective.name, state, self.progress)).encode()).hexdigest()

    @torch.no_grad()
    def __call__(self, model: Model, image: Embedding, text: Embedding, world: World) -> float:
        """Return the mean over the batches. Each rank computes whole batches: no sum depends on the number of ranks.

        image, text: embeddings of all pairs, equal on all ranks. Collective.
        """
        size = min(self.global_batch, len(image))
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0)).to(model.device)
        batches = order[: len(image) // size * size].view(-1, size)
        values = torch.zeros(len(batches), dtype=torch.float64, device=model.device)
        for number in range(world.rank, len(batches), world.size):
            rows, scope = batches[number], Scope(tile=automatic_tile(size, size))
            with torch.autocast(model.device.type, enabled=False), exact_products():
                similarity = model.head.similarity(image[rows], text[rows], scope)
                values[number] = self.objective.value_of_unseen(similarity, self.progress)
        return float(world.sum(values).mean())


def open_validation(
    shards: str | list[str], caption_key: CaptionKeys | None, index_folder: str | None
) -> RetrievalDataset:
    """Return the pairs of shards or tables with an image and a usable caption (the first of several).

    Captions are read now, images on access. Arguments are as in `ShardDataset`. Raises ConfigError for fewer
    than two pairs.
    """
    is_table = holds_tables(shards if isinstance(shards, str) else next(iter(shards), ""))
    rules = (TableRules if is_table else TarRules)(caption_key=caption_key)
    try:
        sources = rules.sources(shards)
    except ConfigError as error:
        message = str(error).replace("data.shards", "eval.validation").replace("data.path", "eval.validation")
        raise ConfigError(message) from None
    reader = ShardReader(ShardCache(None, CACHE_GIGABYTES), rules)
    captions: list[str] = []
    pairs: list[tuple[ShardIndex, int, int]] = []
    unusable: list[str] = []
    for source in sources:
        folders = index_folders(source.shards, index_folder, None)
        index = load_or_build(source.shards, reader.cache, folders, rules=rules)
        for shard in index.shards:
            if shard.flaw or not shard.count:
                say(f"evaluation: eval.validation: shard {shard.name}: {shard.flaw or 'no samples'}")
        for sample in range(index.samples):
            number, position = index.locate(sample)
            try:
                caption = reader.sample(index, number, position).captions(caption_key)[0][0]
                if not index.records[sample]["image_offset"]:
                    raise BadSampleError("missing_image", "no image")
            except BadSampleError as error:
                unusable.append(f"{index.keys(number)[position]} ({error.reason})")
            else:
                captions.append(caption)
                pairs.append((index, number, position))
    if len(pairs) < 2:
        needs = "needs at least 2 pairs of an image and a caption"
        raise ConfigError(f"eval.validation={shards} {needs}, and has {len(pairs)}")
    if unusable:
        share, first = f"{len(unusable)} of {len(pairs) + len(unusable)} samples", ", ".join(unusable[:3])
        say(f"evaluation: {share} of eval.validation have no image or no caption, for example {first}")
    return RetrievalDataset(VALIDATION, _Images(pairs, ShardReader(reader.cache, rules)), captions, range(len(pairs)))


class _Images(Images):
    """Images of pairs in shards, decoded on access."""

    def __init__(self, pairs: Sequence[tuple[ShardIndex, int, int]], reader: ShardReader) -> None:
        self._pairs, self._reader = pairs, reader

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, number: int) -> Image:
        index, shard, position = self._pairs[number]
        try:
            return decode(self._reader.sample(index, shard, position).image())
        except BadSampleError as error:
            place = f"eval.validation: {index.locations[shard]} {index.keys(shard)[position]}"
            remedy = "`clipzoo shards make` leaves such images out"
            raise ConfigError(f"{place} cannot be used: {error.reason}; {remedy}") from error

    def fingerprint(self) -> str:
        indexes = {id(index): index for index, _, _ in self._pairs}.values()
        local = [Path(piece(place)[0]) for index in indexes for place in index.locations if not is_remote(place)]
        places = [(shard, position) for _, shard, position in self._pairs]
        return version_of(local, [index.fingerprint for index in indexes], places)
