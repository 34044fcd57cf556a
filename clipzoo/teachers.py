"""Teachers of a training: frozen models, ensembles, and embeddings of a model that are stored on the disk.

`clipzoo.training.averaging` has the running average of the student as its own teacher.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import chain
from operator import call, itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from clipzoo import io
from clipzoo.build import build_part
from clipzoo.config.trust import require_trusted
from clipzoo.config.vocabulary import Range
from clipzoo.data.captions import digest
from clipzoo.data.loader import iterate
from clipzoo.data.maps.engines import Map, run_map
from clipzoo.distributed.launch import loader_workers
from clipzoo.encoders.base import no_tokenizer
from clipzoo.errors import ConfigError, number_of, one_message
from clipzoo.evaluation.encoder import PRECISIONS, PREFETCH, BatchEncoder, Precision
from clipzoo.evaluation.scoring import exact_products
from clipzoo.evaluation.suite import model_key
from clipzoo.exports.files import save_weights
from clipzoo.exports.hub import load
from clipzoo.heads.base import Head
from clipzoo.heads.pairs import Scope
from clipzoo.io.weights import read_tensors
from clipzoo.model import Model
from clipzoo.runs.directory import FEATURES
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.gradients import GradientCache, PairEncoder, encode_view
from clipzoo.training.parts import Parts, Teacher
from clipzoo.training.tuned import VIEWS, FeatureCache, FeaturesByView, View, feature_caches
from clipzoo.types import Batch, Embedding, PointSet, Similarity, checked, concatenate, map_embedding

PROBES = (
    "", "a red circle", "Two BLUE squares! above_a (green) triangle.", "it's 12 o'clock\nin Paris", "naïve café &amp;",
    "東京 🎉", "<s> </s> <pad> [SEP] <eos> <end_of_text>",
)  # fmt: skip
"""Captions on which the tokenizers of teacher and student are compared."""


class FrozenTeacher(Teacher):
    """A model with its head, in evaluation mode, that does not train.

    Every rank holds all of its weights, also where ranks divide those of the student. Images of another size are
    resized on the device; captions that exceed its context are cut as its tokenizer cuts them.

    model: the model, or the function that loads it, trust -> model. cache_gigabytes: limit of its features on disk,
    for views that do not change between epochs; 0 computes them in every step.
    """

    reads_images = True

    def __init__(self, model: Model | Callable[[Collection[str]], Model], cache_gigabytes: float = 0.0) -> None:
        self._source, self._gigabytes = model, cache_gigabytes
        self._caches: dict[View, FeatureCache] = {}

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        self.frozen = self.model = self._source if isinstance(self._source, Model) else self._source(trust)
        self.needs_padding = self.model.needs_padding
        if student.encoder.tokenizer is self.model.encoder.tokenizer is no_tokenizer:
            return
        own, ids = student.encoder.tokenizer(list(PROBES)), self.model.encoder.tokenizer(list(PROBES))
        # The last id of a caption that is cut is its end.
        length = None if self.needs_padding else min(own.shape[1], ids.shape[1]) - 1
        for caption, row, other in zip(PROBES, own[:, :length].tolist(), ids[:, :length].tolist(), strict=True):
            if row != other:
                raise ConfigError(
                    f"teacher has another tokenizer than the student: {caption!r} is {other[:6]}, and {row[:6]} for "
                    "encoder.tokenizer. Give both the same one, or store its features: clipzoo features, then "
                    "teacher=stored"
                )

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        super().begin(parts, gradients, average, folder)
        self._encoder = PairEncoder(self.model, gradients.autocast, bool(parts.settings.compile))
        if folder is not None:
            limits = dict.fromkeys(VIEWS, self._gigabytes)
            length = self.model.encoder.context_length
            self._caches = feature_caches(parts.dataset, folder, limits, length, parts.report, "teacher")

    def __call__(self, batches: Sequence[Batch], constant: FeaturesByView, scope: Scope) -> Similarity:
        caches = self._caches
        image, text = (encode_view(self._encoder, view, batches, caches.get(view), self._converted) for view in VIEWS)
        return self.model.compare(image, text, scope)

    def _converted(self, batch: Batch) -> Batch:
        """Return the batch with images of the teacher's size, and captions of at most its context."""
        from torchvision.transforms.v2 import InterpolationMode, functional  # takes a second to import

        encoder, text, lengths = self.model.encoder, batch.text, batch.text_length
        image = functional.resize(batch.image, [encoder.image_size] * 2, InterpolationMode.BICUBIC)
        if encoder.context_length is not None and text.shape[-1] > encoder.context_length:
            tokenizer: Any = encoder.tokenizer
            text = text[..., : encoder.context_length].clone()
            text[..., -1][~(text == tokenizer.end_token).any(dim=-1)] = tokenizer.end_token
            lengths = None if lengths is None else lengths.clamp(max=encoder.context_length)
        return replace(batch, image=image, text=text, text_length=lengths)


@checked
class LoadedTeacher(FrozenTeacher):
    """The model of a run, or of another library, see `clipzoo.from_open_clip` and `clipzoo.from_transformers`.

    library: the library of the model. path: a run directory, one of its checkpoints, or a directory of `clipzoo export
    --to hub`; NAME/TAG of open_clip; a folder of transformers. cache_gigabytes: largest size of the features on disk,
    for views that are the same in every epoch; 0 for none. average: the averaged weights of the run. digest: SHA-256 of
    the weights; set when the configuration is checked.
    """

    def __init__(
        self,
        library: Literal["clipzoo", "open_clip", "transformers"],
        path: str,
        cache_gigabytes: Annotated[float, Range(at_least=0)],
        average: bool = False,
        digest: str | None = None,
    ) -> None:
        name = path if library == "clipzoo" else f"{library}:{path}"
        super().__init__(lambda trust: load(name, trust=tuple(trust), average=average), cache_gigabytes)


@checked
class Ensemble(Teacher):
    """Several teachers: the similarity of the first one has that of the second one as its own teacher, and so on.

    teachers: the nodes of the teachers.
    """

    def __init__(self, teachers: list[Teacher]) -> None:
        self._teachers = teachers

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        for teacher in self._teachers:
            teacher.open(parts, student, trust)
        self.needs_padding = any(teacher.needs_padding for teacher in self._teachers)
        self.reads_images = any(teacher.reads_images for teacher in self._teachers)

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        for number, teacher in enumerate(self._teachers):
            teacher.begin(parts, gradients, average, folder and io.below(folder, str(number)))

    def __call__(self, batches: Sequence[Batch], constant: FeaturesByView, scope: Scope) -> Similarity:
        *others, last = [teacher(batches, constant, scope) for teacher in self._teachers]
        return reduce(lambda last, similarity: replace(similarity, teacher=last), reversed(others), last)


# Stored embeddings: features.json, embeddings/head.safetensors with the weights of the head, and in the same folder a
# file for each shard, named by its content, with rows of images, and of texts, their samples and digests.

HEAD = Path("embeddings") / "head.safetensors"
REMEDY = "remove it, and run the same clipzoo features again"
VERSION, OPEN_SHARDS = 1, 64
LOADER_TIMEOUT_SECONDS = 600.0
Opening = tuple[Any, ...]


def shard_files(
    folder: Path, key: str, dataset_shards: Sequence[tuple[str, str, int]]
) -> list[tuple[str, Path, range]]:
    """Return name, file of embeddings, and sample ids of each shard.

    key: that of features.json. dataset_shards: as `Dataset.shards` returns them.
    """
    shards, start = list[tuple[str, Path, range]](), 0
    for name, content, count in dataset_shards:
        file = hashlib.sha256(f"{VERSION} {key} {content}".encode()).hexdigest()[:32]
        path = io.below((folder / HEAD).parent, f"{file}.safetensors")
        shards.append((name, path, range(start, start + count)))
        start += count
    return shards


def _facts(folder: Path) -> dict[str, Any]:
    return io.read_json(folder / FEATURES, io.MB, REMEDY, fields={"model": str, "key": str, "head": dict})


@checked
class StoredTeacher(Teacher):
    """Embeddings of whole images and of all captions, as `clipzoo features` writes them; images are not augmented.

    path: folder of the features. digest: SHA-256 of features.json; set when the configuration is checked.
    """

    def __init__(self, path: str, digest: str | None = None) -> None:
        self._folder, self._shard = Path(path), lru_cache(OPEN_SHARDS)(self._read)

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        self.load(parts.dataset.shards(), trust)

    def load(self, dataset_shards: Sequence[tuple[str, str, int]], trust: Collection[str] = ()) -> None:
        """Find the embeddings of shards, as `Dataset.shards` returns them, and load the head."""
        facts = _facts(self._folder)
        self._shards = shard_files(self._folder, facts["key"], dataset_shards)
        missing = [name for name, file, rows in self._shards if rows and not file.exists()]
        if missing or not self._shards:
            what = f"{len(missing)} of {number_of(len(self._shards), 'shard')} of data.shards, {', '.join(missing[:3])}"
            raise ConfigError(
                f"teacher.path={self._folder} has no features of {what if missing else 'this dataset'}: run clipzoo "
                f"features {facts['model']} data.shards=... --output {self._folder}, which adds missing files"
            )
        require_trusted({"head": facts["head"]}, trust)
        state = read_tensors(self._folder / HEAD, REMEDY)
        with one_message(f"{self._folder / HEAD} does not fit the head of {FEATURES}", REMEDY):
            self.frozen = self._head = head = build_part(facts["head"], trust, Head)
            head.load_state_dict(state)

    def __call__(self, batches: Sequence[Batch], constant: FeaturesByView, scope: Scope) -> Similarity:
        gradients, views, images, texts = self.gradients, batches[0].views, list[Embedding](), list[Embedding]()
        if views.crops:
            raise ConfigError(f"teacher.path={self._folder} has no features of further crops: give teacher=run")
        for batch in batches:
            assert batch.caption_key is not None
            captions = batch.caption_key.view(len(batch), -1).tolist()
            for sample, keys in zip(batch.sample_id.tolist(), captions, strict=True):
                number = bisect_right(self._shards, sample, key=lambda shard: shard[2].start) - 1
                _, file, samples = self._shards[number]
                position, (image, text, rows) = sample - samples.start, self._shard(number)
                images.append(map_embedding(itemgetter([position]), image))
                for key in keys:
                    if (position, key) not in rows:
                        raise ConfigError(
                            f"{file} has no embedding of a text of sample {position}: it has those of the "
                            "data.caption_key, hard_key and box_key that clipzoo features was given"
                        )
                    texts.append(map_embedding(itemgetter([rows[position, key]]), text))
        image, text = (
            map_embedding(lambda t: t.to(gradients.world.device, gradients.model.dtype), concatenate(rows_of_view))
            for rows_of_view in (images, texts)
        )
        return self._head.compare(image, text, scope)

    @torch.no_grad()
    def pair_scores(self) -> np.ndarray:
        """Return the logit of image and first text of all samples of the loaded dataset, [n]."""
        scores = [torch.empty(0)]
        for number, (_, _, samples) in enumerate(self._shards):
            image, text, rows = self._shard(number) if samples else (torch.empty(0), torch.empty(0), {})
            firsts = {position: row for (position, _), row in reversed(rows.items())}
            for part in torch.arange(len(samples)).split(64):
                images = map_embedding(itemgetter(part), image)
                texts = map_embedding(itemgetter([firsts[position] for position in part.tolist()]), text)
                scores.append(self._head.score(images, texts).diagonal())
        return torch.cat(scores).float().numpy()

    def _read(self, number: int) -> tuple[Embedding, Embedding, dict[tuple[int, int], int]]:
        """Return images and texts of a shard, and the rows of its texts by sample and digest of the caption."""
        file = self._shards[number][1]
        tensors = read_tensors(file, REMEDY)
        with one_message(f"{file} does not hold the embeddings of a shard", REMEDY):
            keys = zip(tensors["samples"].tolist(), tensors["captions"].tolist(), strict=True)
            image, text = (
                tensors[view] if view in tensors
                else PointSet(tensors[f"{view}.points"], tensors[f"{view}.log_weights"])
                for view in VIEWS
            )  # fmt: skip
            return image, text, {key: row for row, key in enumerate(keys)}


class EmbeddedShards(Map):
    """Map of shards to the embeddings of their samples.

    opening: function that returns model and open dataset, and its arguments. shards: file and sample ids of each.
    Others: see `Map` and `write_features`.
    """

    def __init__(
        self, opening: Opening, shards: Sequence[tuple[Path, range]], gpus: int, batch: int, precision: Precision
    ) -> None:
        self._opening, self._shards, self.gpus, self._batch, self._precision = opening, shards, gpus, batch, precision

    def contents(self) -> list[str]:
        return [file.name for file, _ in self._shards]

    def files(self, folder: Path) -> list[Path]:
        return [file for file, _ in self._shards]

    @torch.no_grad()
    def write(self, item: int, file: Path) -> None:
        model, dataset = _open(*self._opening)
        transform, precision, rows = model.transform, self._precision, self._shards[item][1]

        def load(number: int) -> tuple[Tensor, list[list[str]]]:
            # Images [b, 3, S, S] and the captions of each sample.
            samples = dataset.whole(rows[number * self._batch : (number + 1) * self._batch])
            return torch.stack([transform(image) for image, _ in samples]), [captions for _, captions in samples]

        size, workers = model.encoder.image_size, loader_workers(model.device.type == "cuda", dataset.workers)
        tokenizer: Any = model.tokenizer
        encoder = BatchEncoder(tokenizer, size, transform.interpolation, self._batch, workers, precision)
        images, texts, captions = list[Embedding](), list[Embedding](), list[list[str]]()
        steps = range(-(-len(rows) // self._batch))
        for pixels, own_captions in iterate(load, steps, workers, PREFETCH, LOADER_TIMEOUT_SECONDS, "data.workers"):
            autocast = torch.autocast(model.device.type, PRECISIONS[precision], enabled=precision != "float32")
            with exact_products(), autocast:
                images.append(map_embedding(Tensor.cpu, model.encode_image(pixels)))
            text = encoder.embed_captions(model, list(chain(*own_captions)), draws=1)[0]
            texts.append(map_embedding(Tensor.cpu, text))
            captions += own_captions
        digests = np.fromiter(map(digest, chain(*captions)), np.uint64)
        counts = torch.tensor([len(of_sample) for of_sample in captions])
        tensors = {"samples": torch.repeat_interleave(counts), "captions": torch.from_numpy(digests.view(np.int64))}
        for view, embedding in (("image", concatenate(images)), ("text", concatenate(texts))):
            values = vars(embedding) if isinstance(embedding, PointSet) else {"": embedding}
            tensors |= {f"{view}.{name}".rstrip("."): value for name, value in values.items()}
        save_weights(tensors, file)


_open = lru_cache(1)(call)
"""Call a function, once for all shards of a process."""


def write_features(
    opening: Opening,
    source: str,
    folder: Path,
    on: str = "local:1",
    *,
    batch: int = 256,
    precision: Precision = "float32",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, int]:
    """Write the embeddings of a dataset's samples; return the numbers of files that this process wrote and of samples.

    Complete files are kept: after a kill the same call continues with the next shard.

    opening: see `EmbeddedShards`. source: name of the model for messages. on, report: see `run_map`. batch: samples per
    batch. precision: of the encoders. Raises ConfigError if the folder has features of another model or other settings.
    """
    model, dataset = _open(*opening)
    key = model_key(model, (precision, model.transform.interpolation, model.transform.resize_mode))
    if not (folder / FEATURES).exists():
        save_weights(model.head.state_dict(), folder / HEAD)
        io.write_json(folder / FEATURES, {"model": source, "key": key, "head": model.config["head"]})
    elif _facts(folder)["key"] != key:
        raise ConfigError(f"{folder} has features of another model or other settings: give another --output")
    shards = [(file, rows) for _, file, rows in shard_files(folder, key, dataset.shards()) if rows]
    work = EmbeddedShards(opening, shards, int(model.device.type == "cuda"), batch, precision)
    return run_map(work, folder, on, report), dataset.samples
