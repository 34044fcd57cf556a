"""Teachers of a training: frozen models, ensembles, and embeddings of a model that are stored on the disk.

`clipzoo.training.averaging` has the running average of the student as its own teacher.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

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
from clipzoo.heads.pairs import Pairing
from clipzoo.io.weights import read_tensors
from clipzoo.loading import LoadedModel, load
from clipzoo.model import Model
from clipzoo.runs.directory import FEATURES
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.gradients import GradientCache, PairEncoder, encode, joined
from clipzoo.training.parts import Parts, Teacher
from clipzoo.training.tuned import VIEWS, FeatureCache, View, feature_caches
from clipzoo.types import Batch, Embedding, Features, PointSet, Similarity, Views, checked, concatenate, map_embedding

LoadModel = Callable[[Collection[str]], Model]
CacheGigabytes = Annotated[float, Range(at_least=0)]
PROBES = (
    "", "a red circle", "Two BLUE squares! above_a (green) triangle.", "it's 12 o'clock\nin Paris", "naïve café &amp;",
    "東京 🎉", "<s> </s> <pad> [SEP] <eos> <end_of_text>",
)  # fmt: skip
"""Captions on which the tokenizers of teacher and student are compared."""
OTHERWISE = "Or store its features, which it computes with its own tokenizer: clipzoo features, then teacher=stored"


def load_model(name: str, trust: Collection[str] = (), average: bool = False) -> LoadedModel:
    """Load "open_clip:NAME/TAG", "transformers:FOLDER", or a model as `clipzoo.load` names it, with its arguments."""
    library, _, place = name.partition(":")
    if library == "transformers":
        return from_transformers(place)
    if library == "open_clip":
        model, _, tag = (place, "", "") if ":" in place else place.partition("/")
        if not tag and ":" not in place:
            raise ConfigError(f"{name} names no weights: give their tag or a file after the name, NAME/TAG")
        return from_open_clip(model, tag or None)
    return load(name, trust=tuple(trust), average=average)


class FrozenTeacher(Teacher):
    """A model with its head, in evaluation mode, that does not train.

    Every rank holds all of its weights, also where ranks divide those of the student. Images of another size are
    resized on the device; captions that exceed its context are cut as its tokenizer cuts them.

    model: the model, or the function that loads it, trust -> model. cache_gigabytes: limit of its features on disk,
    for views that do not change between epochs; 0 computes them in every step. place: key and value, for messages.
    """

    def __init__(self, model: Model | LoadModel, cache_gigabytes: float = 0.0, place: str = "teacher") -> None:
        self._source, self._gigabytes, self._place = model, cache_gigabytes, place
        self._caches: dict[View, FeatureCache] = {}
        self.readers = [self._caches]

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        self.model = self._source if isinstance(self._source, Model) else self._source(trust)
        self.needs_padding = self.model.needs_padding
        require_same_ids(student.encoder, self.model.encoder, self._place)
        own, length = student.encoder.context_length, self.model.encoder.context_length
        if self.needs_padding and own != length:
            raise ConfigError(
                f"{self._place} pads captions to {length} tokens, not to encoder.context_length={own}: give {length}. "
                f"{OTHERWISE}"
            )

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        self._gradients = gradients
        self.model.to(gradients.world.device, gradients.model.dtype).requires_grad_(False).eval()
        self._encoder = PairEncoder(self.model, gradients.autocast, parts.settings.compile)
        if folder is not None:
            limits = dict.fromkeys(VIEWS, self._gigabytes)
            length = self.model.encoder.context_length
            self._caches |= feature_caches(parts.dataset, folder, limits, length, parts.report, "teacher")

    @torch.no_grad()
    def __call__(
        self, micro_batches: Sequence[Batch], constant: Mapping[View, Features], pairing: Pairing | None = None
    ) -> Similarity:
        features, gradients, views = [], self._gradients, micro_batches[0].views
        for view in VIEWS:

            def computed(batch: Batch, view: View = view) -> Features:
                return encode(self._encoder, self._converted(batch), [view])[0]

            cache = self._caches.get(view) if views == Views() else None
            features.append(joined([cache(b, computed) if cache is not None else computed(b) for b in micro_batches]))
        return self.model.compare(*features, gradients.world, gradients.tile, views, pairing)

    def _converted(self, batch: Batch) -> Batch:
        """Return the batch with images of the teacher's size, and captions of at most its context."""
        encoder, image, text, lengths = self.model.encoder, batch.image, batch.text, batch.text_length
        if image.dtype == torch.uint8 and image.shape[-1] != encoder.image_size:
            size = (encoder.image_size, encoder.image_size)
            pixels = image.reshape(-1, *image.shape[-3:]).float()
            pixels = functional.interpolate(pixels, size, mode="bicubic", antialias=True).round().clamp(0, 255)
            image = pixels.to(torch.uint8).reshape(*image.shape[:-2], *size)
        if encoder.context_length is not None and text.shape[-1] > encoder.context_length:
            tokenizer: Any = encoder.tokenizer
            text = text[..., : encoder.context_length].clone()
            text[..., -1][~(text == tokenizer.end_token).any(dim=-1)] = tokenizer.end_token
            lengths = None if lengths is None else lengths.clamp(max=encoder.context_length)
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
                f"{row[:6]} for encoder.tokenizer. Give both the same one. {OTHERWISE}"
            )


@checked
class RunTeacher(FrozenTeacher):
    """The model of a run.

    path: a run directory, one of its checkpoints, or a directory of `clipzoo export --to hub`. average: the averaged
    weights of the run. cache_gigabytes: see FrozenTeacher. digest: SHA-256 of the weights; set when the configuration
    is checked.
    """

    def __init__(self, path: str, average: bool, cache_gigabytes: CacheGigabytes, digest: str | None = None) -> None:
        super().__init__(lambda trust: load_model(path, trust, average), cache_gigabytes, f"teacher.path={path}")


@checked
class LibraryTeacher(FrozenTeacher):
    """A model of another library, see `clipzoo.from_open_clip` and `clipzoo.from_transformers`.

    name: of the model, or the folder of one of transformers. pretrained: tag of open_clip's weights, or a file.
    Other arguments as for RunTeacher.
    """

    def __init__(
        self,
        library: Literal["open_clip", "transformers"],
        name: str,
        pretrained: str | None,
        cache_gigabytes: CacheGigabytes,
        digest: str | None = None,
    ) -> None:
        full_name = f"{library}:{name}" + (f"/{pretrained}" if pretrained else "")
        super().__init__(lambda trust: load_model(full_name), cache_gigabytes, f"teacher.name={name}")


@checked
class Ensemble(Teacher):
    """Several teachers: the similarity of the first one has that of the second one as its own teacher, and so on."""

    def __init__(self, teachers: list[Teacher]) -> None:
        self._teachers = teachers

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        for teacher in self._teachers:
            teacher.open(parts, student, trust)
        self.needs_padding = any(teacher.needs_padding for teacher in self._teachers)
        self.readers = [reader for teacher in self._teachers for reader in teacher.readers]

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        for number, teacher in enumerate(self._teachers):
            teacher.begin(parts, gradients, average, folder and io.below(folder, str(number)))

    def __call__(
        self, micro_batches: Sequence[Batch], constant: Mapping[View, Features], pairing: Pairing | None = None
    ) -> Similarity:
        *others, last = [teacher(micro_batches, constant, pairing) for teacher in self._teachers]
        for similarity in reversed(others):
            last = replace(similarity, teacher=last)
        return last


# Stored embeddings: features.json, embeddings/head.safetensors with the weights of the head, and in the same folder a
# file for each shard, named by its content, with rows of images, and of texts, their samples and digests.

HEAD = Path("embeddings") / "head.safetensors"
FIELDS = {"version": int, "model": str, "key": str, "head": dict}
REMEDY = "remove it, and run the same clipzoo features again"
VERSION, OPEN_SHARDS, PREFETCH = 1, 64, 2
TIMEOUT = 600.0
"""Seconds without a batch after which the loader processes count as hanging."""


def shard_file(folder: Path, key: str, digest: str) -> Path:
    """Return the file of a shard. key: that of features.json. digest: of the shard's samples, from its index."""
    name = hashlib.sha256(f"{key} {digest}".encode()).hexdigest()[:32]
    return io.below((folder / HEAD).parent, f"{name}.safetensors")


@checked
class StoredTeacher(Teacher):
    """Embeddings of whole images and of all captions, as `clipzoo features` writes them; images are not augmented.

    path: folder of the features. digest: SHA-256 of features.json; set when the configuration is checked.
    """

    def __init__(self, path: str, digest: str | None = None) -> None:
        self._folder, self._shard = Path(path), lru_cache(OPEN_SHARDS)(self._read)

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        facts, shards = _facts(self._folder), parts.dataset.shards()
        self._files = [shard_file(self._folder, facts["key"], digest) for _, digest, _ in shards]
        self._starts = [0, *accumulate(count for *_, count in shards)]
        missing = [shard[0] for shard, file in zip(shards, self._files, strict=True) if shard[2] and not file.exists()]
        if missing or not shards:
            what = f"{len(missing)} of {number_of(len(shards), 'shard')} of data.shards, {', '.join(missing[:3])}"
            raise ConfigError(
                f"teacher.path={self._folder} has no features of {what if shards else 'this dataset'}: run clipzoo "
                f"features {facts['model']} data.shards=... --output {self._folder}, which adds missing files"
            )
        require_trusted({"head": facts["head"]}, trust)
        state = read_tensors(self._folder / HEAD, REMEDY)
        with one_message(f"{self._folder / HEAD} does not fit the head of {FEATURES}", REMEDY):
            with torch.device("meta"):
                build_part(facts["head"], trust, Head).load_state_dict(state, assign=True)
            self._head: Head[Any] = build_part(facts["head"], trust, Head)
            self._head.load_state_dict(state)

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        self._gradients = gradients
        self._head.to(gradients.world.device, gradients.model.dtype).requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(
        self, micro_batches: Sequence[Batch], constant: Mapping[View, Features], pairing: Pairing | None = None
    ) -> Similarity:
        views, images, texts = micro_batches[0].views, list[Embedding](), list[Embedding]()
        if views.crops:
            raise ConfigError(f"teacher.path={self._folder} has no features of further crops: give teacher=run")
        for batch in micro_batches:
            assert batch.caption_key is not None
            for sample, keys in zip(
                batch.sample_id.tolist(), batch.caption_key.view(len(batch), -1).tolist(), strict=True
            ):
                number = bisect_right(self._starts, sample) - 1
                position, (tensors, rows) = sample - self._starts[number], self._shard(number)
                images.append(_embedding(tensors, "image", [position]))
                for key in keys:
                    if (position, key) not in rows:
                        raise ConfigError(
                            f"{self._files[number]} has no embedding of a text of sample {position}: it has those of "
                            "the data.caption_key, hard_key and box_key that clipzoo features was given"
                        )
                    texts.append(_embedding(tensors, "text", [rows[position, key]]))
        gradients, (image, text) = self._gradients, (concatenate(images), concatenate(texts))
        image, text = (
            map_embedding(lambda t: t.to(gradients.world.device, gradients.model.dtype), e) for e in (image, text)
        )
        with torch.autocast(gradients.world.device.type, enabled=False):
            return self._head.compare(image, text, gradients.world, gradients.tile, views, pairing)

    def _read(self, number: int) -> tuple[dict[str, Tensor], dict[tuple[int, int], int]]:
        """Return the tensors of a shard, and the rows of its texts by the sample and the digest of the caption."""
        tensors, count = read_tensors(self._files[number], REMEDY), self._starts[number + 1] - self._starts[number]
        with one_message(f"{self._files[number]} does not hold the embeddings of {number_of(count, 'sample')}", REMEDY):
            samples, captions = tensors.pop("samples").tolist(), tensors.pop("captions").tolist()
            for name, value in tensors.items():
                assert len(value) == (count if name.startswith("image") else len(captions)), name
            return tensors, {pair: row for row, pair in enumerate(zip(samples, captions, strict=True))}


def _embedding(tensors: Mapping[str, Tensor], view: str, rows: list[int]) -> Embedding:
    if view in tensors:
        return tensors[view][rows]
    return PointSet(tensors[f"{view}.points"][rows], tensors[f"{view}.log_weights"][rows])


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = io.read_json(folder / FEATURES, io.MB, REMEDY)
    io.require_fields(folder / FEATURES, facts, FIELDS, REMEDY)
    if facts["version"] != VERSION:
        raise io.DamagedFileError(folder / FEATURES, f"has version {facts['version']}, not {VERSION}", REMEDY)
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
    """Write the embeddings of all samples of an open dataset, and return the number of new files. Collective.

    Files that exist are kept, and a file is complete or missing: after a kill the same call continues with the next
    shard. Ranks share the shards.

    source: name of the model for messages. batch: samples per batch. workers: processes that decode images.
    precision: precision of the encoders. half: store float16. report: called with the number of done samples of this
    rank, and of all its samples. Raises ConfigError if the folder has features of another model or other settings.
    """
    transform = model.transform
    key = model_key(model, (VERSION, precision, half, transform.interpolation, transform.resize_mode))
    shards = dataset.shards()
    starts = [0, *accumulate(count for *_, count in shards)]

    def claim() -> list[int]:
        if not (folder / FEATURES).exists():
            save_weights(model.head.state_dict(), folder / HEAD)
            facts = {"version": VERSION, "model": source, "key": key, "head": model.config["head"]}
            io.write_json(folder / FEATURES, facts)
        elif _facts(folder)["key"] != key:
            raise ConfigError(f"{folder} has features of another model or other settings: give another --output")
        files = [shard_file(folder, key, digest) for _, digest, _ in shards]
        return [number for number, file in enumerate(files) if shards[number][2] and not file.exists()]

    missing = world.run_on_first(claim)
    own, done = missing[world.rank :: world.size], 0
    for number in own:
        parts, first, end = [], starts[number], starts[number + 1]
        chunks = _Samples(dataset, model, [range(row, min(row + batch, end)) for row in range(first, end, batch)])
        steps = range(len(chunks.rows))
        for pixels, ids, counts, digests in iterate(chunks, steps, workers, PREFETCH, TIMEOUT, "data.workers"):
            text = concatenate([_embed(model, part, "text", precision) for part in ids.split(batch)])
            parts.append((_embed(model, pixels, "image", precision), text, counts, digests))
            done += len(pixels)
            report(done, sum(shards[shard][2] for shard in own))
        images, texts, counts, digests = (list(column) for column in zip(*parts, strict=True))
        tensors = {"samples": torch.repeat_interleave(torch.cat(counts)), "captions": torch.cat(digests)}
        for view, embedding in (("image", concatenate(images)), ("text", concatenate(texts))):
            values = vars(embedding) if isinstance(embedding, PointSet) else {"": embedding}
            tensors |= {f"{view}.{name}".rstrip("."): value.half() if half else value for name, value in values.items()}
        save_weights(tensors, shard_file(folder, key, shards[number][1]))
    world.barrier()
    return len(missing)


@torch.no_grad()
def _embed(model: LoadedModel, inputs: Tensor, view: View, precision: Precision) -> Embedding:
    """Images uint8 [b, 3, S, S] or token ids [b, L] -> embeddings on the CPU."""
    head, is_image = model.head, view == "image"
    with exact_products():
        with torch.autocast(model.device.type, PRECISIONS[precision], enabled=precision != "float32"):
            features = model.image_features(inputs) if is_image else model.text_features(inputs)
        with torch.autocast(model.device.type, enabled=False):
            return map_embedding(Tensor.cpu, head.embed_image(features) if is_image else head.embed_text(features))


@dataclass(frozen=True, eq=False)
class _Samples(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Item k: images [b, 3, S, S], token ids of all captions [T, L], captions of each sample [b], their digests [T]."""

    dataset: ShardDataset
    model: LoadedModel
    rows: Sequence[range]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        samples, tokenizer = self.dataset.whole(self.rows[number]), self.model.tokenizer
        captions = [caption for _, own in samples for caption in own]
        ids = tokenizer(captions)
        if not self.model.needs_padding:
            ids = trim_padding(ids, tokenizer.end_token)  # type: ignore[attr-defined]
        pixels = torch.stack([self.model.transform(image) for image, _ in samples])
        digests = torch.from_numpy(np.fromiter(map(digest, captions), np.uint64).view(np.int64))
        return pixels, ids, torch.tensor([len(own) for _, own in samples]), digests
