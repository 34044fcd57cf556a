"""Evaluation of a model on a list of datasets."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch

from clipzoo import io
from clipzoo.config.vocabulary import CaptionKeys, Count, Distinct, Epochs, Names, Range, Seed, Side, Widths, Workers
from clipzoo.data.tokenizer import Tokenizer
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.choice import Choice
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, catalogue, dataset_key, suites
from clipzoo.evaluation.datasets.prompts import Protocol
from clipzoo.evaluation.diagnosis import Diagnosis
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES, BatchEncoder, keep_freed_memory
from clipzoo.evaluation.mteb import evaluate_tasks, open_task
from clipzoo.evaluation.probe import FewShot, LinearProbe, Neighbours
from clipzoo.evaluation.retrieval import ImageTextRetrieval
from clipzoo.evaluation.robustness import robustness
from clipzoo.evaluation.task import Clock, Column, Evaluation, Rows, Solve, Task, View, store
from clipzoo.evaluation.validation import HeldOutLoss, open_validation
from clipzoo.evaluation.zero_shot import ZeroShotClassification
from clipzoo.model import Model
from clipzoo.runs.record import VALIDATION, VALIDATION_LOSS, MetricKey, parsed, written
from clipzoo.types import Part, Progress, checked, evaluation_mode

REMEDY = "the dataset is evaluated again"
VALUE_BYTES = 256 * io.MB
"""Largest size of a stored fit, which has the predictions of a test split."""
Measurement = tuple[Task, EvaluationDataset]


@checked
class Suite(Part):
    """Evaluates a model on datasets under `root`; finished datasets are cached, so that an evaluation can resume.

    root: folder of the datasets, or an fsspec URL of datasets in tars; {name} is CLIP_benchmark's name of the dataset.
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
    diagnosis: names of the datasets for the diagnosis of the embedding; map: its plane map, see `Diagnosis`.
    at_start: evaluate before the first step too, such as the initial weights of fine-tuning.
    validation: shards of held-out pairs, on which recall is measured, and during training also the objective's
        loss, validation/loss.
    caption_key, index_folder: as data.caption_key and data.index_folder, for the validation shards.
    knn, few_shot: names of the datasets for nearest neighbours and few-shot probes, with the probe's crop.
    neighbours: number of nearest neighbours.
    shots, shot_seeds: train images of each class in a few-shot probe, and number of draws.
    calibration: measure the calibration of zero-shot probabilities.
    choice: names of the datasets of examples with a few images and captions.
    add: names of further datasets; each is measured by the task of its kind.
    cache_folder: folder of the local copies of the datasets of a URL.
    mteb: names of tasks of mteb, or its tasks.
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
        diagnosis: Names | None = None,
        map: Literal["pca", "umap"] = "pca",
        at_start: bool = False,
        resize_mode: Literal["shortest", "squash", "longest"] = "shortest",
        validation: str | list[str] | None = None,
        caption_key: CaptionKeys | None = None,
        index_folder: str | None = None,
        knn: Annotated[Sequence[str], Distinct()] = (),
        few_shot: Annotated[Sequence[str], Distinct()] = (),
        neighbours: Count = 20,
        shots: Widths = (1, 2, 4, 8, 16),
        shot_seeds: Count = 5,
        calibration: bool = False,
        choice: Annotated[Sequence[str], Distinct()] = (),
        add: Annotated[Sequence[str], Distinct()] = (),
        cache_folder: str = "data/downstream_cache",
        mteb: Sequence[Any] = (),
    ) -> None:
        self._root, self._cache, self._added = root, Path(cache_folder), add
        if validation is not None and VALIDATION in retrieval:
            raise ConfigError(f"eval.retrieval names a dataset {VALIDATION}: this name is reserved for eval.validation")
        self.validation, self._of_shards = validation, (caption_key, index_folder)
        resize = round(probe_resize * image_size)
        self._tasks: list[tuple[Task, Sequence[str]]] = [
            (ZeroShotClassification(calibration), zero_shot),
            (LinearProbe(resize, probe_validation, seed), linear_probe),
            (Neighbours(resize, neighbours), knn),
            (FewShot(resize, shots, shot_seeds), few_shot),
            (ImageTextRetrieval(paired), retrieval),
            (Choice(), choice),
            (Diagnosis(map, seed), diagnosis or []),
        ]
        self._encoder = BatchEncoder(tokenizer, image_size, interpolation, batch_size, workers, precision, resize_mode)
        self._draws, self._paired, self._keep_features, self._calibrated = draws, paired, keep_features, calibration
        self._every_epochs, self._at_start = every_epochs, at_start
        self._prompts: Protocol = prompts
        self._missing_is_error = missing == "error"
        # Settings that affect all tasks.
        self._settings = (root, image_size, interpolation, resize_mode, prompts, precision, draws)
        # Datasets by the names of the task and of the dataset.
        self._datasets: dict[tuple[str, str], EvaluationDataset] = {}
        self._mteb, self._mteb_tasks = mteb, list[Any]()
        self._missing: dict[str, str] = {}

    def open(self) -> None:
        """Open and check all datasets; the error for missing ones names each with the command that gets it."""
        self._datasets, self._missing = {}, {}
        for name in dict.fromkeys([*(name for _, names in self._tasks for name in names), *self._added]):
            splits = {"test", *(split for task, names in self._tasks if name in names for split in task.splits)}
            splits |= {"val"} if "train" in splits else set()
            try:
                dataset = open_benchmark(name, self._root, self._prompts, sorted(splits), self._cache)
            except MissingDatasetError as error:
                self._missing[name] = str(error)
                continue
            faults = []
            for task, names in self._tasks:
                if name not in names and (name not in self._added or task.name != dataset.task):
                    continue
                present = dataset.splits if isinstance(dataset, ClassificationDataset) else task.splits
                if lacking := " and ".join(sorted(set(task.splits) - set(present))):
                    faults.append(f"{name} has no split {lacking}: add it, or remove {name} from eval.{task.name}")
                else:
                    task.check(dataset)
                    self._datasets[task.name, name] = dataset
            if faults:
                self._missing[name] = "; ".join(faults)
        self._mteb_tasks = []
        for task in self._mteb:
            try:
                self._mteb_tasks.append(open_task(task))
            except ConfigError as error:
                self._missing[str(task)] = str(error)
        if self.validation is not None:
            pairs = open_validation(self.validation, *self._of_shards)
            self._datasets[ImageTextRetrieval.name, VALIDATION] = pairs
        if self._missing and self._missing_is_error:
            raise ConfigError("\n         ".join(self._missing.values()))
        for text in self._missing.values():
            say(f"evaluation: missing: {text}")

    def require(self, metric: str | None, global_batch: int) -> None:
        """Raise ConfigError for a best metric that no dataset has; note fewer pairs than a global batch of training."""
        pairs = self._datasets.get((ImageTextRetrieval.name, VALIDATION))
        if pairs is not None and (count := len(pairs.split_images("test"))) < global_batch:
            fewer = f"{number_of(count, 'pair')}, fewer than trainer.global_batch={global_batch}"
            effect = f"{VALIDATION_LOSS} has fewer negatives than the training loss and is lower"
            say(f"evaluation: eval.validation has {fewer}: {effect}")
        measured = [MetricKey(task.name, dataset.name, "", "") for task, dataset in self._measurements(None)]
        places = [str(place) for place in measured if place.is_ranked]
        places += [f"mteb/{task.metadata.name}" for task in self._mteb_tasks]
        loss = [] if self.validation is None else [str(VALIDATION_LOSS)]
        starts = tuple(f"{place}{ending}" for place in places for ending in ("/", "_paired/"))
        if metric is not None and metric not in loss and not metric.startswith(starts):
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
        if not self._datasets and not self._mteb_tasks and not self._missing:
            self.open()
        if model.device.type == "cpu":
            keep_freed_memory()
        # Batch norm's running statistics differ between ranks in training; a checkpoint has the first rank's.
        world.broadcast_(model.buffers())
        encoder, draws = replace(self._encoder, world=world), self._draws if model.head.stochastic else 1
        with evaluation_mode(model):
            if self._datasets or self._missing:
                world.run_on_first(lambda: io.write_json(output / "missing.json", self._missing))
            # A run knows the scale of SigLIP's probabilities only after its training.
            scale = (model.pair_scale,) if self._calibrated else ()
            evaluation, key = Evaluation(model, encoder, draws, output), model_key(model, (*self._settings, *scale))
            metrics = evaluate(evaluation, self._measurements(held_out), key, self._keep_features)
            metrics |= written(robustness(parsed(metrics)) | datacomp_average(parsed(metrics)))
            tasks = self._mteb_tasks
            return metrics | (world.run_on_first(lambda: evaluate_tasks(tasks, evaluation, key)) if tasks else {})

    def _measurements(self, held_out: HeldOutLoss | None) -> list[Measurement]:
        """Tasks with their available datasets, in the order of the metrics."""
        tasks = [(task, [*names, *self._added]) for task, names in self._tasks]
        tasks.append((ImageTextRetrieval(self._paired, held_out), [VALIDATION]))
        pairs = [(task, name) for task, names in tasks for name in dict.fromkeys(names)]
        return [(task, self._datasets[task.name, name]) for task, name in pairs if (task.name, name) in self._datasets]


@dataclass(eq=False)
class Result:
    """Metrics of a task on a dataset by flat keys, None before they are measured. path, key: their file, its key."""

    task: Task
    dataset: EvaluationDataset
    path: Path
    key: str
    metrics: dict[str, float] | None = None

    def stored(self) -> dict[str, float] | None:
        """Metrics in the file; None for those of another key."""
        content = io.read_json(self.path, io.MB, REMEDY) if self.path.exists() else {}
        if content.get("key") != self.key:
            return None
        io.require_fields(self.path, content, {"metrics": dict}, REMEDY)
        io.require_fields(self.path, content["metrics"], dict.fromkeys(content["metrics"], io.NUMBER), REMEDY)
        return content["metrics"]

    def measure(self, evaluation: Evaluation, columns: Rows) -> None:
        """Turn columns into metrics, and store these. Collective."""
        measured = self.task.measure(evaluation, self.dataset, columns)
        metrics = {
            self.task.key(self.dataset, protocol, metric): value
            for protocol, values in measured.items()
            for metric, value in values.items()
        }
        self.metrics = written(metrics)
        content = {"key": self.key, "metrics": self.metrics}
        evaluation.encoder.world.run_on_first(lambda: io.write_json(self.path, content))

    def say(self, seconds: float) -> None:
        headline = ", ".join(
            f"{key.protocol and f'{key.protocol}/'}{key.metric} {value:.{key.decimals}f}"
            for key, value in parsed(self.metrics or {}).items()
            if key.metric in ("top1", "recall_at_1", "loss", "mean_average_precision", "modality_gap")
            or key.metric.endswith("_shot")
            or (key.metric in ("text", "image", "group", "jaccard") and not key.protocol)
        )
        say(f"evaluation: {self.task.name} {self.dataset.name}: {headline} ({seconds:.1f} s)")


@dataclass(eq=False)
class Job:
    """A long computation for a result, whose value is kept in a file."""

    result: Result
    name: str
    solve: Solve
    path: Path

    def stored(self) -> Any:
        """Value in the file; None for that of another key."""
        content = io.read_json(self.path, VALUE_BYTES, REMEDY) if self.path.exists() else {}
        return content.get("value") if content.get("key") == self.result.key else None


def evaluate(
    evaluation: Evaluation, measurements: Sequence[Measurement], key: str, keep_features: bool
) -> dict[str, float]:
    """Return the metrics of tasks on datasets by flat keys; those that an earlier call has stored are read. Collective.

    Each view of a dataset is encoded once for all tasks. Long computations follow, those of all datasets together, so
    that no rank waits for another's. key: cache key of the model and of settings that affect all tasks.
    """
    world, output = evaluation.encoder.world, evaluation.output
    datasets = list({dataset.name: dataset for _, dataset in measurements}.values())
    # The first rank looks at the files of the images: they may be millions.
    keys = world.run_on_first(lambda: {dataset.name: dataset_key(key, dataset) for dataset in datasets})
    results = []
    for task, dataset in measurements:
        result_key = hashlib.sha256(repr((keys[dataset.name], task.settings)).encode()).hexdigest()
        results.append(Result(task, dataset, io.below(output, f"{task.name}/{dataset.name}.json"), result_key))
    damage = io.DamageLog()
    stored = world.run_on_first(lambda: [damage.read(result.stored, None) for result in results])
    begin = time.perf_counter()
    for result, metrics in zip(results, stored, strict=True):
        result.metrics = metrics
        if metrics is not None:
            result.say(0)
    # Several tasks share a view of a dataset.
    sizes = {
        (result.dataset.name, view): len(result.dataset.split_images(view.split))
        for result in results
        if result.metrics is None
        for view in result.task.views(evaluation, result.dataset)
    }
    clock = Clock(sum(sizes.values()))
    columns_of: dict[str, Rows] = {}
    jobs: list[Job] = []

    def finish(result: Result, solved: Mapping[str, Any]) -> None:
        nonlocal begin
        result.measure(replace(evaluation, solved=solved), columns_of[result.dataset.name])
        now = time.perf_counter()
        result.say(now - begin)
        begin = now

    def remove_columns() -> None:
        waiting = {result.dataset.name for result in results if result.metrics is None}
        for dataset in datasets:
            if dataset.name not in waiting and not keep_features:
                shutil.rmtree(io.below(output, f"features/{dataset.name}"), ignore_errors=True)

    for dataset in datasets:
        folder = io.below(output, f"features/{dataset.name}")
        waiting = [result for result in results if result.dataset.name == dataset.name and result.metrics is None]
        functions: dict[View, dict[str, Column]] = {}
        for result in waiting:
            by_name = result.task.columns(evaluation, dataset)
            for view in result.task.views(evaluation, dataset):
                functions[view] = {**by_name, **functions.get(view, {})}
        columns_of[dataset.name] = {
            view: store(evaluation, dataset, view, by_name, folder, keys[dataset.name], clock)
            for view, by_name in functions.items()
        }
        functions.clear()  # classifiers
        for result in waiting:
            solves = result.task.solves(evaluation, dataset, columns_of[dataset.name])
            for name, solve in solves.items():
                jobs.append(Job(result, name, solve, io.below(folder, f"{result.task.name}.{name}.json")))
            if not solves:
                finish(result, {})
        if world.size == 1 or dataset is datasets[-1]:  # several ranks wait for the jobs of all datasets
            _solve(jobs, world)
            values = world.run_on_first(lambda: [job.stored() for job in jobs])
            for result in dict.fromkeys(job.result for job in jobs):
                solved = {job.name: value for job, value in zip(jobs, values, strict=True) if job.result is result}
                finish(result, solved)
            jobs.clear()
        world.run_on_first(remove_columns)
    return {name: value for result in results for name, value in (result.metrics or {}).items()}


def _solve(jobs: Sequence[Job], world: World) -> None:
    """Run the jobs without a stored value, the longest first, each on the rank that is free next. Collective."""
    damage = io.DamageLog()
    done = world.run_on_first(lambda: [damage.read(job.stored, None) is not None for job in jobs])
    todo = [job for job, is_done in zip(jobs, done, strict=True) if not is_done]
    todo.sort(key=lambda job: -job.solve.cost)
    costs = [job.solve.cost for job in todo]
    begin = printed = time.perf_counter()

    def work() -> None:
        nonlocal printed
        try:
            for number in world.deal(len(todo)):
                job, now = todo[number], time.perf_counter()
                if number and now - printed > SECONDS_BETWEEN_LINES:
                    printed, left = now, (now - begin) * sum(costs[number:]) / sum(costs[:number])
                    say(f"evaluation: {number} of {number_of(len(todo), 'fit')}, about {left:.0f} s remaining")
                io.write_json(job.path, {"key": job.result.key, "value": job.solve.run()})
        except Exception:
            world.barrier()
            raise
        # Ranks may be busy for longer than the timeout of collectives.
        world.barrier()

    world.run_on_all(work)


def datacomp_average(metrics: Mapping[MetricKey, float]) -> dict[MetricKey, float]:
    """Return datacomp/average, the mean in percent of DataComp's metric over the measured datasets of eval=datacomp.

    datacomp/datasets is their number: only with all 38 is the average that of the published tables (Gadre et al. 2023,
    appendix N). Retrieval counts the mean recall at 1 of both directions, WinoGAViL the Jaccard index of its examples
    with 10 to 12 candidates. Empty without any of the datasets.
    """
    values = []
    for task, names in suites()["datacomp"].items():
        for name in names:
            keys = {
                "zero_shot": [MetricKey(task, name, "", catalogue()[name].get("metric", ""))],
                "retrieval": [MetricKey(task, name, way, "recall_at_1") for way in ("image_to_text", "text_to_image")],
                "choice": [MetricKey(task, name, "10_to_12_candidates", "jaccard")],
            }[task]
            if all(key in metrics for key in keys):
                values.append(fmean(metrics[key] for key in keys))
    if not values:
        return {}
    average = {"average": fmean(values), "datasets": float(len(values))}
    return {MetricKey("datacomp", "", "", metric): value for metric, value in average.items()}


def model_key(model: Model, settings: tuple[object, ...]) -> str:
    """Cache key over the weights and the settings that affect a result."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
