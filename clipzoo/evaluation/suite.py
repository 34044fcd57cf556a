"""A list of data sets and what to measure on them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from math import floor
from pathlib import Path
from typing import Any, Literal

import torch

from clipzoo.data.tokenizer import Tokenizer
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation import artefacts
from clipzoo.evaluation import cache as kept
from clipzoo.evaluation.checks import check_classes, check_labels, check_paired
from clipzoo.evaluation.encoding import Encoding
from clipzoo.evaluation.probe.features import WHERE, read_features, write_features
from clipzoo.evaluation.probe.penalty_search import probe
from clipzoo.evaluation.retrieval import retrieval
from clipzoo.evaluation.zero_shot import zero_shot
from clipzoo.io import write_whole
from clipzoo.model import Model
from clipzoo.runs.directory import say


class Suite:
    """Evaluates a model on the sets under `root`; each finished set is kept, so that a stopped evaluation goes on.

    zero_shot, linear_probe, retrieval: names of sets. tokenizer, image_size: the encoder's.
    interpolation: of the resized picture. prompts: whose class names and templates, see sets/catalogue.py.
    missing: whether a set that is not there is an error or reported. probe_resize: the shorter side before the
    probe's central crop, as a multiple of image_size (zero-shot and retrieval: 1). probe_validation: the share of train
    that the probe chooses on where a set has no validation split. batch_size: pictures or captions at once on a rank.
    workers: processes that decode, on each rank. precision: of the encoders. draws: of random features, for heads that
    have them. paired: also the paired recall of KME-CLIP. every_epochs: also during training; null only at its end.
    seed: of the validation samples held out where a set has none. keep_features: leave the probe's features on disk.
    """

    def __init__(
        self,
        root: str,
        zero_shot: list[str],
        linear_probe: list[str],
        retrieval: list[str],
        tokenizer: Tokenizer,
        image_size: int,
        interpolation: Literal["bicubic", "bilinear"],
        prompts: Literal["slip", "clip", "set"],
        missing: Literal["error", "report"],
        probe_resize: float,
        probe_validation: float,
        batch_size: int,
        workers: int,
        precision: Literal["bf16", "fp16", "float32"],
        draws: int,
        paired: bool,
        every_epochs: float | None,
        seed: int,
        keep_features: bool,
    ) -> None:
        for key, value in {"batch_size": batch_size, "draws": draws}.items():
            if value < 1:
                raise ConfigError(f"eval.{key} must be at least 1, not {value}")
        if probe_resize < 1:
            raise ConfigError(f"eval.probe_resize={probe_resize} would crop beyond the picture: it must be at least 1")
        if not 0 < probe_validation < 1:
            raise ConfigError(f"eval.probe_validation must be between 0 and 1, not {probe_validation}")
        if every_epochs is not None and every_epochs <= 0:
            raise ConfigError(f"eval.every_epochs must be above 0, not {every_epochs}: null evaluates at the end only")
        self._root = Path(root)
        self._names = {"zero_shot": zero_shot, "linear_probe": linear_probe, "retrieval": retrieval}
        self._encoding = Encoding(tokenizer, image_size, interpolation, batch_size, workers, precision)
        self._probe_resize, self._probe_validation = round(probe_resize * image_size), probe_validation
        self._draws, self._paired, self._seed = draws, paired, seed
        self._every = every_epochs
        # What changes a result besides the weights.
        probed = probe_resize, probe_validation
        self._facts = (root, image_size, interpolation, prompts, probed, precision, draws, paired, seed)
        self._keep_features = keep_features
        self._prompts: Literal["slip", "clip", "set"] = prompts
        self._missing_is_error = missing == "error"
        self._sets: dict[str, Any] = {}
        self._missing: dict[str, str] = {}

    def open(self) -> None:
        """Find all sets, before anything slow; every one that is missing is named with the way to get it."""
        from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark

        self._missing = {}
        for name in dict.fromkeys(name for names in self._names.values() for name in names):
            try:
                self._sets[name] = open_benchmark(name, self._root, self._prompts)
                self._check(name)
            except MissingDatasetError as error:
                self._missing[name] = str(error)
        if self._missing and self._missing_is_error:
            raise ConfigError("\n         ".join(self._missing.values()))
        for text in self._missing.values():
            say(f"evaluation: missing: {text}")

    def _check(self, name: str) -> None:
        """Raise when a set cannot do what it is listed for."""
        splits = getattr(self._sets[name], "splits", {})
        for task, needed in {"zero_shot": {"test"}, "linear_probe": {"train", "test"}}.items():
            if name in self._names[task] and not needed <= set(splits):
                lacks = " and ".join(sorted(needed - set(splits)))
                raise ConfigError(f"{name} has no split {lacks}: take it out of eval.{task}")
            for split in needed if name in self._names[task] else ():
                labels, names = getattr(splits[split], "labels", None), self._sets[name].class_names
                if labels is not None:
                    check_labels(torch.tensor(labels), names, name, split)
                    check_classes(torch.tensor(labels), names, f"{name}, {split}")
        if name in self._names["retrieval"]:
            if not hasattr(self._sets[name], "captions"):
                raise ConfigError(f"{name} has no captions: take it out of eval.retrieval")
            if self._paired:
                check_paired(self._sets[name].caption_image, name)

    def require(self, metric: str | None) -> None:
        """Raise where trainer.best_metric names a metric of no set that is evaluated."""
        known = [f"{task}/{name}" for task in self._names for name in self._there(task)]
        if metric is not None and not any(metric.startswith((f"{each}/", f"{each}_paired/")) for each in known):
            shown = ", ".join(f"{each}/..." for each in known) or "none: eval has no sets"
            raise ConfigError(f"there is no metric trainer.best_metric={metric} (there are: {shown})")

    def due(self, before: float, now: float) -> bool:
        """Whether training that went from epoch `before` to `now` has passed an evaluation."""
        return self._every is not None and floor(now / self._every) > floor(before / self._every)

    @torch.no_grad()
    def run(self, model: Model, output: Path, world: World = World()) -> dict[str, float]:
        """All metrics in percent, by flat keys; pictures and tables for the report go to `output`."""
        if not self._sets and not self._missing:
            self.open()
        # Batch norm's running statistics are a rank's own in training; a checkpoint has the first rank's.
        world.broadcast_(model.buffers())
        key = kept.key(model, self._facts)
        training = model.training
        model.eval()
        try:
            return self._run(model, output, key, replace(self._encoding, world=world))
        finally:
            model.train(training)

    def _run(self, model: Model, output: Path, key: str, encoding: Encoding) -> dict[str, float]:
        world = encoding.world
        metrics: dict[str, float] = {}
        if self._sets or self._missing:
            text = json.dumps(self._missing, indent=1)
            world.run_on_first(lambda: write_whole(kept.made(output / "missing.json"), text))
        for name in self._there("zero_shot"):
            path = output / "zero_shot" / f"{name}.json"
            own = kept.of_set(key, self._sets[name])
            metrics |= kept.kept(path, own, partial(self._zero_shot, model, name, output, encoding), world)
        for name in self._there("linear_probe"):
            path = output / "linear_probe" / f"{name}.json"
            own = kept.of_set(key, self._sets[name])
            metrics |= kept.kept(path, own, partial(self._linear_probe, model, name, output, own, encoding), world)
        for name in self._there("retrieval"):
            path = output / "retrieval" / f"{name}.json"
            own = kept.of_set(key, self._sets[name])
            metrics |= kept.kept(path, own, partial(self._retrieval, model, name, output, encoding), world)
        return metrics

    def _there(self, task: str) -> list[str]:
        return [name for name in self._names[task] if name in self._sets]

    def _zero_shot(self, model: Model, name: str, output: Path, encoding: Encoding) -> dict[str, float]:
        data = self._sets[name]
        result = zero_shot(model, data, "test", encoding, encoding.image_size, self._draws)
        path = output / "zero_shot" / f"{name}.npz"
        encoding.world.run_on_first(lambda: artefacts.write_zero_shot(path, data, "test", result))
        return {f"zero_shot/{name}/{metric}": value for metric, value in result.metrics.items()}

    def _retrieval(self, model: Model, name: str, output: Path, encoding: Encoding) -> dict[str, float]:
        data = self._sets[name]
        result = retrieval(model, data, encoding, self._draws, self._paired)
        path = output / "retrieval" / f"{name}.npz"
        encoding.world.run_on_first(lambda: artefacts.write_retrieval(path, data, result))
        metrics = {}
        for metric, value in result.metrics.items():
            set_name, metric = (f"{name}_paired", metric[7:]) if metric.startswith("paired/") else (name, metric)
            metrics[f"retrieval/{set_name}/{metric}"] = value
        return metrics

    def _linear_probe(self, model: Model, name: str, output: Path, key: str, encoding: Encoding) -> dict[str, float]:
        world = encoding.world
        data = self._sets[name]
        folder = output / "features" / name
        for split, samples in data.splits.items():
            write_features(model, samples, name, split, encoding, self._probe_resize, folder, key)
        # One rank a probe: the solver itself is not distributed.
        found: dict[str, dict[str, Any]] = {}
        for turn, where in enumerate(WHERE):
            if turn % world.size == world.rank:
                found[where] = self._solve(data, where, folder, model.device)
        # A large set keeps the solving ranks busy for longer than a collective may take.
        world.barrier()
        merged = {where: each for part in world.gather_object(found) for where, each in part.items()}
        if world.is_first:
            write_whole(kept.made(output / "linear_probe" / f"{name}.search.json"), json.dumps(merged, indent=1))
            if not self._keep_features:
                shutil.rmtree(folder)
        return {
            f"linear_probe/{name}/{where}/{metric}": value
            for where in WHERE
            for metric, value in merged[where]["metrics"].items()
        }

    def _solve(self, data: Any, where: str, folder: Path, device: torch.device) -> dict[str, Any]:
        splits = {split: read_features(folder, split, where).to(device) for split in data.splits}
        names, name = list(data.class_names), f"{data.name}, {where} projection"
        result = probe(splits, names, data.metric, self._probe_validation, self._seed, name)
        return {"metrics": result.metrics, "C": result.c, "converged": result.converged, "search": result.search}
