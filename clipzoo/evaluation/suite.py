"""Evaluation of a model on a list of datasets."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch

from clipzoo import io
from clipzoo.config.vocabulary import CaptionKeys, Count, Epochs, Names, Range, Seed, Side, Workers
from clipzoo.data.images import DECODING
from clipzoo.data.tokenizer import Tokenizer
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation import outputs, scoring
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.datasets.prompts import Protocol
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.evaluation.probe import LinearProbe
from clipzoo.evaluation.retrieval import retrieval
from clipzoo.evaluation.validation import HeldOutLoss, open_validation
from clipzoo.evaluation.zero_shot import zero_shot
from clipzoo.model import Model
from clipzoo.runs.record import VALIDATION, VALIDATION_LOSS, MetricKey, parsed, written
from clipzoo.types import Part, Progress, checked, evaluation_mode

REMEDY = "the dataset is evaluated again"
SPLITS = {"zero_shot": {"test"}, "linear_probe": {"train", "test"}}
"""Splits that a task needs."""


@checked
class Suite(Part):
    """Evaluates a model on datasets under `root`; finished datasets are cached, so that an evaluation can resume.

    root: folder of the datasets.
    zero_shot, linear_probe, retrieval: names of the datasets for each task.
    tokenizer, image_size: those of the model's encoder.
    interpolation, resize_mode: resizing of images, see `Transform`.
    prompts: class names and templates of "slip" or "clip", or the dataset's own, see datasets/benchmarks.py.
    missing: raise an error for missing datasets, or report them.
    probe_resize: shorter side before the probe's central crop, as a multiple of image_size (other tasks: 1).
    probe_validation: share of train on which the probe chooses C if a dataset has no validation split.
    batch_size: images or captions per batch on one rank.
    workers: processes per rank that decode images.
    precision: precision of the encoders.
    draws: number of draws of random features, for heads that have them.
    paired: measure the paired recall of KME-CLIP too.
    every_epochs: epochs between evaluations during training; None evaluates only at its end.
    seed: seeds the draw of the train samples on which the linear probe chooses C.
    keep_features: keep the probe's features on disk.
    at_start: evaluate before the first step too, such as the initial weights of fine-tuning.
    validation: shards of held-out pairs, on which recall is measured, and during training also the objective's
        loss, validation/loss.
    caption_key, index_folder: as data.caption_key and data.index_folder, for the validation shards.
    """

    def __init__(
        self,
        root: str,
        zero_shot: Names,
        linear_probe: Names,
        retrieval: Names,
        tokenizer: Tokenizer,
        image_size: Side,
        interpolation: Literal["bicubic", "bilinear"],
        prompts: Literal["slip", "clip", "set"],
        missing: Literal["error", "report"],
        probe_resize: Annotated[float, Range(at_least=1, at_most=10)],
        probe_validation: Annotated[float, Range(at_least=1e-3, below=1)],
        batch_size: Count,
        workers: Workers,
        precision: Literal["bf16", "fp16", "float32"],
        draws: Count,
        paired: bool,
        every_epochs: Epochs | None,
        seed: Seed,
        keep_features: bool,
        at_start: bool = False,
        resize_mode: Literal["shortest", "squash", "longest"] = "shortest",
        validation: str | list[str] | None = None,
        caption_key: CaptionKeys | None = None,
        index_folder: str | None = None,
    ) -> None:
        self._root = Path(root)
        if validation is not None and VALIDATION in retrieval:
            raise ConfigError(f"eval.retrieval names a dataset {VALIDATION}: this name is reserved for eval.validation")
        self.validation, self._of_shards = validation, (caption_key, index_folder)
        names = {"zero_shot": zero_shot, "linear_probe": linear_probe, "retrieval": retrieval}
        self._names = names if validation is None else {**names, "retrieval": [*retrieval, VALIDATION]}
        self._encoder = BatchEncoder(tokenizer, image_size, interpolation, batch_size, workers, precision, resize_mode)
        self._probe = LinearProbe(round(probe_resize * image_size), probe_validation, seed, keep_features)
        self._draws, self._paired = draws, paired
        self._every_epochs, self._at_start = every_epochs, at_start
        self._prompts: Protocol = prompts
        self._missing_is_error = missing == "error"
        # Settings that affect a result; their order is part of the cache key.
        crop = probe_resize, probe_validation
        resizing = () if resize_mode == "shortest" else (resize_mode,)
        self._settings = (root, image_size, interpolation, prompts, crop, precision, draws, paired, seed, *resizing)
        self._datasets: dict[str, EvaluationDataset] = {}
        self._missing: dict[str, str] = {}

    def open(self) -> None:
        """Open and check all datasets; the error for missing ones names each with the command that gets it."""
        self._missing = {}
        for name in dict.fromkeys(name for names in self._names.values() for name in names):
            if self.validation is not None and name == VALIDATION:
                self._datasets[name] = open_validation(self.validation, *self._of_shards)
                continue
            try:
                self._datasets[name] = open_benchmark(name, self._root, self._prompts)
                self._check(self._datasets[name])
            except MissingDatasetError as error:
                self._missing[name] = str(error)
        if self._missing and self._missing_is_error:
            raise ConfigError("\n         ".join(self._missing.values()))
        for text in self._missing.values():
            say(f"evaluation: missing: {text}")

    def require(self, metric: str | None, global_batch: int) -> None:
        """Raise ConfigError if the datasets have no metric trainer.checkpoints.best_metric.

        Print a note if the validation set has fewer pairs than `global_batch`, a batch of the training.
        """
        pairs = self._datasets.get(VALIDATION) if self.validation is not None else None
        if isinstance(pairs, RetrievalDataset) and len(pairs.images) < global_batch:
            say(
                f"evaluation: eval.validation has {number_of(len(pairs.images), 'pair')}, fewer than "
                f"trainer.global_batch={global_batch}: {VALIDATION_LOSS} has fewer negatives than "
                "the training loss and is lower"
            )
        places = [f"{task}/{name}" for task in self._names for name in self._available(task)]
        is_loss = metric == str(VALIDATION_LOSS) and self.validation is not None
        is_known = metric is None or any(metric.startswith((f"{place}/", f"{place}_paired/")) for place in places)
        if not is_loss and not is_known:
            loss = [] if self.validation is None else [str(VALIDATION_LOSS)]
            choices = ", ".join([*(f"{place}/..." for place in places), *loss]) or "none: eval has no datasets"
            raise ConfigError(f"there is no metric trainer.checkpoints.best_metric={metric} (there are: {choices})")

    def due(self, before: Progress, now: Progress) -> bool:
        """Return True if training has passed a multiple of every_epochs between two points; equal: at its start."""
        if before == now:
            return self._at_start
        every = self._every_epochs
        return every is not None and now.completed(every) > before.completed(every)

    @torch.no_grad()
    def run(self, model: Model, output: Path, world: World, held_out: HeldOutLoss | None = None) -> dict[str, float]:
        """Return all metrics by flat keys, in percent except losses; write tables and images of the report to `output`.

        held_out: loss of the training's objective, for the validation pairs. Collective.
        """
        if not self._datasets and not self._missing:
            self.open()
        # Batch norm's running statistics differ between ranks in training; a checkpoint has the first rank's.
        world.broadcast_(model.buffers())
        key = model_key(model, self._settings)
        metrics: dict[str, float] = {}
        with evaluation_mode(model):
            if self._datasets or self._missing:
                world.run_on_first(lambda: io.write_json(output / "missing.json", self._missing))
            for task in self._names:
                for name in self._available(task):
                    dataset = self._datasets[name]
                    loss = held_out if name == VALIDATION and self.validation is not None else None
                    cache_key = dataset_key(key if loss is None else key + loss.key, dataset)
                    measure = partial(self._measure, task, model, dataset, output, world, cache_key, loss)
                    metrics |= cached(io.below(output, f"{task}/{name}.json"), cache_key, measure, world)
        return metrics

    def _measure(
        self,
        task: str,
        model: Model,
        dataset: EvaluationDataset,
        output: Path,
        world: World,
        key: str,
        held_out: HeldOutLoss | None,
    ) -> dict[str, float]:
        """Metrics of one dataset by flat keys."""
        encoder = replace(self._encoder, world=world)
        loss: Mapping[str, float] = {}
        path = io.below(output, f"{task}/{dataset.name}.npz")
        metrics: Mapping[str, Mapping[str, float]]
        if isinstance(dataset, RetrievalDataset):
            retrieved = retrieval(model, dataset, encoder, self._draws, self._paired, held_out)
            world.run_on_first(lambda: outputs.write_retrieval(path, dataset, retrieved))
            metrics, loss = retrieved.metrics, retrieved.loss
        elif task == "zero_shot":
            classified = zero_shot(model, dataset, encoder, encoder.image_size, self._draws)
            world.run_on_first(lambda: outputs.write_zero_shot(path, dataset, classified))
            metrics = {"": classified.metrics}
        else:
            metrics = self._probe.run(model, dataset, encoder, output, key)
        return written(
            {
                MetricKey(task, dataset.name, protocol, metric): value
                for protocol, values in metrics.items()
                for metric, value in values.items()
            }
            | {replace(VALIDATION_LOSS, metric=metric): value for metric, value in loss.items()}
        )

    def _check(self, dataset: EvaluationDataset) -> None:
        """Raise ConfigError if a task that lists the dataset cannot use it, MissingDatasetError if it lacks a split."""
        name, missing = dataset.name, []
        for task in (task for task in SPLITS if name in self._names[task]):
            if isinstance(dataset, RetrievalDataset):
                raise ConfigError(f"{name} has captions and no classes: move it from eval.{task} to eval.retrieval")
            absent = sorted(SPLITS[task] - set(dataset.splits))
            if absent:
                missing.append(f"{name} has no split {' and '.join(absent)}: add it, or remove {name} from eval.{task}")
                continue
            for split in sorted(SPLITS[task]):
                labels = torch.tensor(dataset.splits[split].labels)
                scoring.check_labels(labels, dataset.class_names, f"{name}, {split}", complete=True)
        if name in self._names["retrieval"]:
            if not isinstance(dataset, RetrievalDataset):
                raise ConfigError(f"{name} has classes and no captions: move it from eval.retrieval to eval.zero_shot")
            scoring.check_captions(dataset, self._paired)
        if missing:
            raise MissingDatasetError("; ".join(missing))

    def _available(self, task: str) -> list[str]:
        opened = {name: self._datasets[name] for name in self._names[task] if name in self._datasets}
        return [
            name
            for name, dataset in opened.items()
            if isinstance(dataset, RetrievalDataset) or SPLITS[task] <= set(dataset.splits)
        ]


def model_key(model: Model, settings: tuple[object, ...]) -> str:
    """Cache key over the weights and the settings that affect a result."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dataset_key(key: str, dataset: EvaluationDataset) -> str:
    """Cache key over `key`, the decoding of images, and the dataset's names, prompts, labels and captions.

    Images are not read.
    """
    facts: list[object]
    splits: list[tuple[str, int, object]] = []
    if isinstance(dataset, RetrievalDataset):
        facts = [None, None, None, dataset.captions, dataset.caption_image]
    else:
        facts = [dataset.class_names, dataset.templates, dataset.metric, None, None]
        splits = [(split, len(samples), samples.labels) for split, samples in dataset.splits.items()]
    return hashlib.sha256(repr((key, DECODING, facts, splits)).encode()).hexdigest()


def cached(path: Path, key: str, measure: Callable[[], dict[str, float]], world: World) -> dict[str, float]:
    """Return the metrics stored in `path` if their key is `key`; otherwise measure and store them. Collective."""
    start = time.perf_counter()

    def stored() -> dict[str, float] | None:
        content = io.read_json(path, io.MB, REMEDY) if path.exists() else {}
        if content.get("key") != key:
            return None
        io.require_fields(path, content, {"metrics": dict}, REMEDY)
        io.require_fields(path, content["metrics"], dict.fromkeys(content["metrics"], io.NUMBER), REMEDY)
        return content["metrics"]

    metrics = world.run_on_first(lambda: io.DamageLog().read(stored, None))
    if metrics is None:
        metrics = measure()
        world.run_on_first(lambda: io.write_json(path, {"key": key, "metrics": metrics}))
    headline = ", ".join(
        f"{key.protocol and f'{key.protocol}/'}{key.metric} {value:.{key.decimals}f}"
        for key, value in parsed(metrics).items()
        if key.metric in ("top1", "recall_at_1", "loss")
    )
    say(f"evaluation: {path.parent.name} {path.stem}: {headline} ({time.perf_counter() - start:.1f} s)")
    return metrics
