"""Teachers of a training: frozen models, ensembles, and embeddings of a model that are stored on the disk.

`clipzoo.training.averaging` has the running average of the student as its own teacher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from clipzoo import io
from clipzoo.build import build_part
from clipzoo.config.trust import require_trusted
from clipzoo.config.vocabulary import Range
from clipzoo.data.captions import digest
from clipzoo.data.dataset import ShardDataset
from clipzoo.data.loader import iterate
from clipzoo.data.tokenizer import trim_padding
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder, no_tokenizer
from clipzoo.errors import ConfigError, number_of, one_message
from clipzoo.evaluation.encoder import PRECISIONS, Precision
from clipzoo.evaluation.scoring import exact_products
from clipzoo.evaluation.suite import model_key
from clipzoo.exports.files import save_weights
from clipzoo.exports.open_clip import from_open_clip
from clipzoo.exports.transformers import from_transformers
from clipzoo.heads.base import Head
from clipzoo.io.weights import read_tensors, registry_of
from clipzoo.loading import LoadedModel, load
from clipzoo.model import Model
from clipzoo.runs.directory import FEATURES
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.gradients import GradientCache, PairEncoder, encode, joined
from clipzoo.training.parts import Parts, Teacher
from clipzoo.training.tuned import VIEWS, FeatureCache, View
from clipzoo.types import (
    Batch,
    Embedding,
    Features,
    Part,
    PointSet,
    Similarity,
    Views,
    checked,
    concatenate,
    map_embedding,
)

PROBES = (
    "", "a red circle", "Two BLUE squares! above_a (green) triangle.", "it's 12 o'clock\nin Paris", "naïve café &amp;",
    "東京 🎉", "<s> </s> <pad> [SEP] <eos> <end_of_text>",
)  # fmt: skip
"""Captions on which the tokenizers of teacher and student are compared."""
CacheGigabytes = Annotated[float, Range(at_least=0)]
STORED = "clipzoo features MODEL, then teacher=stored, gives a teacher its own tokenizer"


class FrozenTeacher(Part):
    """A model with its head, in evaluation mode, that does not train.

    Every rank holds all of its weights, also where ranks divide those of the student. Images of another size are
    resized on the device; captions that exceed its context are cut as its tokenizer cuts them.

    model: the model; None for subclasses, which load it in `open`. cache_gigabytes: limit of its features on disk, for
    views that do not change between epochs; 0 computes them in every step.
    """

    def __init__(self, model: Model | None = None, cache_gigabytes: float = 0.0) -> None:
        self._model, self._cache_gigabytes, self._place = model, cache_gigabytes, "teacher"
        self.caches: dict[View, FeatureCache] = {}

    def load(self, trust: Collection[str]) -> Model:
        """Return the model. trust: as in `clipzoo.load`."""
        assert self._model is not None
        return self._model

    @property
    def model(self) -> Model:
        assert self._model is not None, "`open` comes first"
        return self._model

    @property
    def needs_padding(self) -> bool:
        return self.model.needs_padding

    @property
    def readers(self) -> list[Mapping[View, FeatureCache]]:
        return [self.caches]

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        self._model = self.load(trust)
        require_same_ids(student.encoder, self.model.encoder, self._place)
        lengths = student.encoder.context_length, self.model.encoder.context_length
        if self.needs_padding and lengths[0] != lengths[1]:
            raise ConfigError(
                f"{self._place} pads captions to {lengths[1]} tokens, not to encoder.context_length={lengths[0]}: "
                f"give {lengths[1]}. Or: {STORED}"
            )

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        dataset, settings, self._gradients = parts.dataset, parts.settings, gradients
        self.model.to(gradients.world.device, gradients.model.dtype).requires_grad_(False).eval()
        self._encoder = PairEncoder(self.model, settings.autocast_dtype, settings.compile)
        for view in VIEWS if folder is not None and self._cache_gigabytes else ():
            if dataset.repeats(view):
                length = self.model.encoder.context_length if view == "text" else None
                self.caches[view] = FeatureCache(
                    folder, view, dataset.samples, self._cache_gigabytes, length, parts.report,
                    images=lambda ids: [image for image, _ in dataset.examples(ids)], key="teacher",
                )  # fmt: skip

    @torch.no_grad()
    def __call__(self, micro_batches: Sequence[Batch], constant: Mapping[View, Features]) -> Similarity:
        def computed(view: View, batch: Batch) -> Features:
            return encode(self._encoder, self._converted(batch), [view])[0]

        def cached(view: View, batch: Batch) -> Features:
            cache = self.caches.get(view)
            if cache is None or batch.views != Views():
                return computed(view, batch)
            return cache(batch, lambda part: computed(view, part))

        image, text = (joined([cached(view, batch) for batch in micro_batches]) for view in VIEWS)
        gradients = self._gradients
        return self.model.compare(image, text, gradients.world, gradients.tile, micro_batches[0].views)

    def _converted(self, batch: Batch) -> Batch:
        """Return the batch with images of the teacher's size, and captions of at most its context."""
        encoder, image, text = self.model.encoder, batch.image, batch.text
        size, length = encoder.image_size, encoder.context_length
        if image.dtype == torch.uint8 and image.shape[-2:] != (size, size):
            pixels = functional.interpolate(
                image.reshape(-1, *image.shape[-3:]).float(), (size, size), mode="bicubic", antialias=True
            )
            image = pixels.round().clamp(0, 255).to(torch.uint8).reshape(*image.shape[:-2], size, size)
        lengths = batch.text_length
        if length is not None and text.shape[-1] > length:
            end = self.model.encoder.tokenizer.end_token  # type: ignore[attr-defined]
            text = text[..., :length].clone()
            text[..., -1][~(text == end).any(dim=-1)] = end
            lengths = None if lengths is None else lengths.clamp(max=length)
        return replace(batch, image=image, text=text, text_length=lengths)


def require_same_ids(student: Encoder, teacher: Encoder, place: str) -> None:
    """Raise ConfigError if the tokenizers of two encoders give other ids. place: key and value of the teacher."""
    if student.tokenizer is no_tokenizer and teacher.tokenizer is no_tokenizer:
        return
    own, ids = student.tokenizer(list(PROBES)), teacher.tokenizer(list(PROBES))
    # The last id of a caption that is cut is its end.
    length = min(own.shape[1], ids.shape[1]) - 1
    for caption, row, other in zip(PROBES, own[:, :length].tolist(), ids[:, :length].tolist(), strict=True):
        if row != other:
            raise ConfigError(
                f"{place} has another tokenizer than the student: {caption!r} is {other[:6]} for the teacher and "
                f"{row[:6]} for encoder.tokenizer. Give both the same one. Or: {STORED}"
            )


def load_model(name: str, trust: Collection[str] = (), average: bool = False) -> LoadedModel:
    """Load "open_clip:NAME/TAG", "huggingface:FOLDER", or a model as `clipzoo.load` names it, with its arguments."""
    registry, place = registry_of(name), name.partition(":")[2]
    if registry is None:
        return load(name, trust=tuple(trust), average=average)
    if average or registry not in ("open_clip", "huggingface"):
        raise ConfigError(f"{name} has no averaged weights" if average else f"{name} has no text tower")
    if registry == "huggingface":
        return from_transformers(place)
    model, _, tag = (place, "", "") if place.startswith(("local-dir:", "hf-hub:")) else place.partition("/")
    return from_open_clip(model, tag or None)


@checked
class RunTeacher(FrozenTeacher):
    """The model of a run.

    path: a run directory, one of its checkpoints, or a directory of `clipzoo export --to hub`. average: the averaged
    weights of the run. cache_gigabytes: see FrozenTeacher. digest: SHA-256 of the weights; set when the configuration
    is checked.
    """

    def __init__(self, path: str, average: bool, cache_gigabytes: CacheGigabytes, digest: str | None = None) -> None:
        super().__init__(None, cache_gigabytes)
        self._path, self._average, self._place = path, average, f"teacher.path={path}"

    def load(self, trust: Collection[str]) -> Model:
        return load_model(self._path, trust, self._average)


@checked
class OpenClipTeacher(FrozenTeacher):
    """A model of open_clip, see `clipzoo.from_open_clip`. Other arguments as for RunTeacher."""

    def __init__(
        self, name: str, pretrained: str | None, cache_gigabytes: CacheGigabytes, digest: str | None = None
    ) -> None:
        super().__init__(None, cache_gigabytes)
        self._name, self._pretrained, self._place = name, pretrained, f"teacher.name={name}"

    def load(self, trust: Collection[str]) -> Model:
        if self._pretrained is None and ":" not in self._name:
            raise ConfigError(f"{self._place} has no weights: give teacher.pretrained=TAG or a file")
        return from_open_clip(self._name, self._pretrained)


@checked
class TransformersTeacher(FrozenTeacher):
    """A CLIPModel or SiglipModel of transformers, see `clipzoo.from_transformers`. name: its folder."""

    def __init__(self, name: str, cache_gigabytes: CacheGigabytes, digest: str | None = None) -> None:
        super().__init__(None, cache_gigabytes)
        self._name, self._place = name, f"teacher.name={name}"

    def load(self, trust: Collection[str]) -> Model:
        return from_transformers(self._name)


@checked
class Ensemble(Part):
    """Several teachers: the similarity of the first one has that of the second one as its own teacher, and so on."""

    def __init__(self, teachers: list[Teacher]) -> None:
        self._teachers = teachers

    @property
    def needs_padding(self) -> bool:
        return any(teacher.needs_padding for teacher in self._teachers)

    @property
    def readers(self) -> list[Mapping[View, FeatureCache]]:
        return [reader for teacher in self._teachers for reader in teacher.readers]

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        for teacher in self._teachers:
            teacher.open(parts, student, trust)

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        for number, teacher in enumerate(self._teachers):
            teacher.begin(parts, gradients, average, folder and folder / str(number))

    def __call__(self, micro_batches: Sequence[Batch], constant: Mapping[View, Features]) -> Similarity:
        similarity = None
        for teacher in reversed(self._teachers):
            similarity = replace(teacher(micro_batches, constant), teacher=similarity)
        assert similarity is not None
        return similarity


# Stored embeddings: features.json and the weights of the head, and one file for each shard, named by its content.


FACTS, HEAD = FEATURES, "head.safetensors"
FIELDS = {"version": int, "model": str, "key": str, "head": dict}
REMEDY = "remove it, and run the same clipzoo features again"
VERSION = 1
OPEN_SHARDS = 64
PREFETCH = 2


def shard_file(folder: Path, key: str, digest: str) -> Path:
    """Return the file of a shard. key: that of features.json. digest: of the shard's samples, from its index."""
    return folder / f"{hashlib.sha256(f'{key} {digest}'.encode()).hexdigest()[:32]}.safetensors"


@checked
class StoredTeacher(Part):
    """Embeddings of whole images and of all captions, as `clipzoo features` writes them; images are not augmented.

    path: folder of the features. digest: SHA-256 of features.json; set when the configuration is checked.
    """

    needs_padding = False
    readers: list[Mapping[View, FeatureCache]] = []  # noqa: RUF012 - always empty

    def __init__(self, path: str, digest: str | None = None) -> None:
        self._folder, self._read = Path(path), lru_cache(OPEN_SHARDS)(self._read_shard)

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        place, shards = f"teacher.path={self._folder}", parts.dataset.shards()
        facts = _facts(self._folder)
        files = [shard_file(self._folder, facts["key"], digest) for _, digest, _ in shards]
        self._counts = [count for _, _, count in shards]
        self._files, self._starts = files, np.concatenate([[0], np.cumsum(self._counts)])
        missing = [shard[0] for shard, file in zip(shards, files, strict=True) if shard[2] and not file.exists()]
        if missing or not shards:
            lacking = f"of {len(missing)} of {number_of(len(shards), 'shard')} of data.shards, first {missing[:1]}"
            raise ConfigError(
                f"{place} lacks the features {lacking if shards else 'of this dataset, which has no shards'}: run "
                f"clipzoo features {facts['model']} data.shards=... --output {self._folder}, which adds missing files"
            )
        require_trusted({"head": facts["head"]}, trust)
        state = read_tensors(self._folder / HEAD, REMEDY)
        with one_message(f"{self._folder / HEAD} does not fit the head of {FACTS}", REMEDY):
            with torch.device("meta"):
                shapes = {
                    name: value.shape for name, value in build_part(facts["head"], trust, Head).state_dict().items()
                }
            if shapes != {name: value.shape for name, value in state.items()}:
                raise ConfigError("its tensors have other names or shapes")
            self._head: Head[Any] = build_part(facts["head"], trust, Head)
            self._head.load_state_dict(state)

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        self._gradients = gradients
        self._head.to(gradients.world.device, gradients.model.dtype).requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(self, micro_batches: Sequence[Batch], constant: Mapping[View, Features]) -> Similarity:
        gradients, views = self._gradients, micro_batches[0].views
        if views.crops or views.boxes:
            raise ConfigError(
                f"teacher.path={self._folder} has no features of further crops and boxes: give teacher=run"
            )
        ids = torch.cat([batch.sample_id for batch in micro_batches]).cpu()
        given = [batch.caption_key for batch in micro_batches if batch.caption_key is not None]
        keys = torch.cat(given).cpu().view(len(ids), -1) if given else None
        shards = torch.from_numpy(np.searchsorted(self._starts, ids.numpy(), side="right") - 1)
        order = shards.argsort(stable=True)
        images, texts = list[Embedding](), list[Embedding]()
        for shard in shards.unique().tolist():
            rows = order[shards[order] == shard]
            image, text = self._rows(shard, ids[rows] - int(self._starts[shard]), None if keys is None else keys[rows])
            images.append(image)
            texts.append(text)
        place = order.argsort()
        text_place = (place[:, None] * views.texts + torch.arange(views.texts)).flatten()

        def on_device(embeddings: list[Embedding], rows: Tensor) -> Any:
            device, dtype = gradients.world.device, gradients.model.dtype
            return map_embedding(lambda tensor: tensor.to(device, dtype), concatenate(embeddings)[rows])

        image, text = on_device(images, place), on_device(texts, text_place)
        with torch.autocast(gradients.world.device.type, enabled=False):
            similarity = self._head.similarity(image, text, gradients.world, gradients.tile)
        return replace(similarity, image=image, text=text)

    def _rows(self, shard: int, rows: Tensor, keys: Tensor | None) -> tuple[Embedding, Embedding]:
        """Return the embeddings of images and texts of some samples of a shard. keys: digests of the texts, [n, K]."""
        tensors = self._read(shard)
        first, captions = tensors["first"], tensors["captions"]
        start, stop = first[rows], first[rows + 1]
        if keys is None:
            found = torch.where(stop - start == 1, start, -1)[:, None]
        else:
            found = torch.full_like(keys, -1)
            for offset in range(int((stop - start).max())):
                place = torch.minimum(start + offset, stop - 1)[:, None]
                found = torch.where((found < 0) & (captions[place] == keys), place, found)
        if (found < 0).any():
            sample = int(rows[(found < 0).any(dim=1)][0])
            raise ConfigError(
                f"{self._files[shard]} has no embedding of a text of sample {sample}: it holds one for each caption of "
                "data.caption_key, and none of hard captions"
            )
        return _embedding(tensors, "image", rows), _embedding(tensors, "text", found.flatten())

    def _read_shard(self, shard: int) -> dict[str, Tensor]:
        """Return the tensors of a shard's file; their values are read when they are used. Raises DamagedFileError."""
        path, count = self._files[shard], self._counts[shard]
        tensors = read_tensors(path, REMEDY)
        first, captions = (tensors.get(name, torch.zeros(0, dtype=torch.int64)) for name in ("first", "captions"))
        rows = {name: len(value) for name, value in tensors.items() if name not in ("first", "captions")}
        expected = {name: count if name.startswith("image") else len(captions) for name in rows}
        if (
            len(first) != count + 1
            or first[0]
            or first[-1] != len(captions)
            or (first.diff() < 1).any()
            or rows != expected
        ):
            raise io.DamagedFileError(path, f"does not hold the embeddings of {number_of(count, 'sample')}", REMEDY)
        return tensors


def _embedding(tensors: Mapping[str, Tensor], view: str, rows: Tensor) -> Embedding:
    if view in tensors:
        return tensors[view][rows]
    return PointSet(tensors[f"{view}.points"][rows], tensors[f"{view}.log_weights"][rows])


def _facts(folder: Path) -> dict[str, Any]:
    if not (folder / FACTS).exists():
        raise ConfigError(f"{folder} has no features: there is no {FACTS}; clipzoo features MODEL data=... writes them")
    facts: dict[str, Any] = io.read_json(folder / FACTS, io.MB, REMEDY)
    io.require_fields(folder / FACTS, facts, FIELDS, REMEDY)
    if facts["version"] != VERSION:
        raise io.DamagedFileError(folder / FACTS, f"has version {facts['version']}, not {VERSION}", REMEDY)
    return facts


def write_features(
    model: LoadedModel,
    source: str,
    dataset: ShardDataset,
    folder: Path,
    world: World = World(),
    *,
    batch: int = 256,
    workers: int = 0,
    precision: Precision = "float32",
    half: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the embeddings of all samples of an open dataset; files that exist are kept. Collective.

    A file is complete or missing: a command that was killed continues with the next shard. Ranks share the shards.

    source: name of the model for messages. batch: samples per batch. workers: processes that decode images.
    precision: precision of the encoders. half: store float16. report: called with the samples done and those of this
    rank. Returns the number of files that all ranks wrote.

    Raises:
        ConfigError: the folder has the features of another model or with other settings.
    """
    key = model_key(model, (VERSION, precision, half, model.transform.interpolation, model.transform.resize_mode))
    facts = {"version": VERSION, "model": source, "key": key, "head": model.config["head"]}
    shards = dataset.shards()

    def claim() -> list[int]:
        if (folder / FACTS).exists():
            if _facts(folder)["key"] != key:
                raise ConfigError(
                    f"{folder} has features of another model, or with other settings: give another --output"
                )
        else:
            save_weights(model.head.state_dict(), folder / HEAD)
            io.write_json(folder / FACTS, facts)
        return [
            number for number, (_, digest, count) in enumerate(shards)
            if count and not shard_file(folder, key, digest).exists()
        ]  # fmt: skip

    missing = world.run_on_first(claim)
    starts = np.concatenate([[0], np.cumsum([count for _, _, count in shards])]).tolist()
    own = missing[world.rank :: world.size]
    chunks = [
        (number, first, min(first + batch, starts[number + 1]))
        for number in own
        for first in range(starts[number], starts[number + 1], batch)
    ]
    total, done = sum(stop - first for _, first, stop in chunks), 0
    items = iterate(_Samples(dataset, model, chunks), range(len(chunks)), workers, PREFETCH, world.timeout, "--workers")
    with closing(items):
        for number, parts in groupby(zip(chunks, items, strict=True), key=lambda pair: pair[0][0]):
            images, texts, digests, counts = list[Embedding](), list[Embedding](), list[Tensor](), list[Tensor]()
            for (_, first, stop), (pixels, ids, keys, captions) in parts:
                image, text = _embed(model, pixels, ids, batch, precision)
                images.append(image)
                texts.append(text)
                digests.append(keys)
                counts.append(captions)
                done += stop - first
                report(done, total)
            tensors = {"captions": torch.cat(digests), "first": functional.pad(torch.cat(counts).cumsum(0), (1, 0))}
            for view, embedding in (("image", concatenate(images)), ("text", concatenate(texts))):
                values = vars(embedding) if isinstance(embedding, PointSet) else {"": embedding}
                for name, value in values.items():
                    tensors[f"{view}.{name}".rstrip(".")] = value.half() if half else value
            save_weights(tensors, shard_file(folder, key, shards[number][1]))
    world.barrier()
    return len(missing)


@torch.no_grad()
def _embed(
    model: LoadedModel, pixels: Tensor, ids: Tensor, batch: int, precision: Precision
) -> tuple[Embedding, Embedding]:
    """uint8 [b, 3, S, S] and token ids [T, L] -> embeddings on the CPU."""
    texts = []
    with exact_products():
        for part in (pixels, *ids.split(batch)):
            with torch.autocast(model.device.type, PRECISIONS[precision], enabled=precision != "float32"):
                encode = model.image_features if part is pixels else model.text_features
                features = encode(part)
            with torch.autocast(model.device.type, enabled=False):
                embed = model.head.embed_image if part is pixels else model.head.embed_text
                texts.append(map_embedding(Tensor.cpu, embed(features)))
    return texts[0], concatenate(texts[1:])


@dataclass(frozen=True, eq=False)
class _Samples(TorchDataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Item k: images [b, 3, S, S], token ids of all captions [T, L], their digests [T], captions of each sample [b].

    chunks: number of the shard, first sample id, sample id after the last one.
    """

    dataset: ShardDataset
    model: LoadedModel
    chunks: Sequence[tuple[int, int, int]]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, first, stop = self.chunks[number]
        samples = self.dataset.whole(range(first, stop))
        captions = [caption for _, own in samples for caption in own]
        tokenizer: Any = self.model.tokenizer
        ids = tokenizer(captions)
        if not self.model.needs_padding:
            ids = trim_padding(ids, tokenizer.end_token)
        pixels = torch.stack([self.model.transform(image) for image, _ in samples])
        digests = torch.from_numpy(np.array([digest(caption) for caption in captions], dtype=np.uint64).view(np.int64))
        return pixels, ids, digests, torch.tensor([len(own) for _, own in samples])
