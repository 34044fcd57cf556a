"""Linear probes: frozen features in files, logistic regression, and the search for its penalty."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, LabelledSplit, Metric
from clipzoo.evaluation.encoder import SECONDS_BETWEEN_LINES, BatchEncoder
from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.evaluation.outputs import write_arrays
from clipzoo.model import Model
from clipzoo.types import Embedding, Features

PROJECTIONS = ("before", "after")
REMEDY = "the features are computed again"
GRID = torch.logspace(-6, 6, 97, dtype=torch.float64).tolist()
"""Values of C."""
STRIDES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class LinearProbe:
    """Settings of linear probes.

    resize: shorter side in pixels before the central crop. validation_share: share of train held out if a dataset has
    no validation split. seed: seeds the draw of held-out samples. keep_features: keep the features on disk.
    """

    resize: int
    validation_share: float
    seed: int
    keep_features: bool

    def run(
        self, model: Model, dataset: ClassificationDataset, encoder: BatchEncoder, output: Path, key: str
    ) -> dict[str, dict[str, float]]:
        """Return metrics in percent "before" and "after" the projection. Collective.

        output: folder of the evaluation; the search for C is written to linear_probe/<dataset>.search.json, labels and
        predictions of the test samples to linear_probe/<dataset>.npz. key: cache key of the features.
        """
        world, folder = encoder.world, io.below(output, f"features/{dataset.name}")
        for split, images in dataset.splits.items():
            write_features(model, images, dataset.name, split, encoder, self.resize, folder, key)
        # The solver is not distributed: ranks take projections in turn.
        fits: dict[str, Probe] = {}
        for projection in PROJECTIONS[world.rank :: world.size]:
            stored = {split: read_features(folder, split, projection) for split in dataset.splits}
            parts = {split: LabelledFeatures(*(x.to(model.device) for x in part)) for split, part in stored.items()}
            name = f"{dataset.name}, {projection} projection"
            fits[projection] = probe(parts, dataset.class_names, dataset.metric, self.validation_share, self.seed, name)
        # A large dataset keeps the solving ranks busy for longer than the timeout of collectives.
        world.barrier()
        probes = {projection: result for part in world.gather_object(fits) for projection, result in part.items()}
        for projection, result in probes.items():
            if not result.converged:
                say(
                    f"evaluation: probe of {dataset.name}, {projection} projection: the final fit at C={result.c:.3g} "
                    f"did not converge in {number_of(result.iterations, 'iteration')}; its accuracy is approximate"
                )
        if world.is_first:
            content = {
                name: {"metrics": part.metrics, "C": part.c, "converged": part.converged, "search": part.search}
                for name, part in probes.items()
            }
            io.write_json(io.below(output, f"linear_probe/{dataset.name}.search.json"), content)
            answers = {f"all_{projection}": result.predictions.numpy() for projection, result in probes.items()}
            labels = probes[PROJECTIONS[0]].labels.numpy()
            write_arrays(io.below(output, f"linear_probe/{dataset.name}.npz"), all_labels=labels, **answers)
            if not self.keep_features:
                shutil.rmtree(folder)
        return {projection: probes[projection].metrics for projection in PROJECTIONS}


class LabelledFeatures(NamedTuple):
    """features [n, d] and labels [n]."""

    features: Tensor
    labels: Tensor

    def rows(self, chosen: Tensor) -> LabelledFeatures:
        return LabelledFeatures(self.features[chosen], self.labels[chosen])


def write_features(
    model: Model,
    images: LabelledSplit,
    name: str,
    split: str,
    encoder: BatchEncoder,
    resize: int,
    folder: Path,
    key: str,
) -> None:
    """Encode one split, unless `folder` has its features under the same key; the first rank writes. Collective.

    Files: <split>.before.npy and <split>.after.npy [n, d], <split>.labels.npy [n], and last <split>.key.
    name: of the dataset, for messages. resize, key: see `LinearProbe`.
    """
    world = encoder.world
    key_file, paths = io.below(folder, f"{split}.key"), _paths(folder, split)

    def is_written() -> bool:
        matches = io.read_text(key_file, io.MB, REMEDY) == key
        return matches and all(len(_load(path)) == len(images) for path in paths)

    # Damaged files are named in the log.
    if world.run_on_first(lambda: key_file.exists() and io.DamageLog().read(is_written, False)):
        return

    def compute(features: Features, labels: Tensor) -> list[Embedding]:
        return [*(model.head.probe(features, projection).float() for projection in PROJECTIONS), labels]

    files: list[IO[bytes]] = []
    for batch in encoder.images(model, images, resize, compute, f"features of {name}, {split}"):
        if not world.is_first:
            continue
        arrays = [part.cpu().numpy() for part in batch if isinstance(part, Tensor)]
        if not files:
            io.make_folder(folder)
            key_file.unlink(missing_ok=True)
            files = [_allocated(path, array, len(images)) for path, array in zip(paths, arrays, strict=True)]
        for path, file, array in zip(paths, files, arrays, strict=True):
            with io.explained(path):
                file.write(array.tobytes())
    for path, file in zip(paths, files, strict=False):
        with io.explained(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
    world.run_on_first(lambda: io.write_whole(key_file, key))


def read_features(folder: Path, split: str, projection: str) -> LabelledFeatures:
    """Read the files of `write_features`. projection: "before" or "after". Raises DamagedFileError."""
    paths = dict(zip((*PROJECTIONS, "labels"), _paths(folder, split), strict=True))
    return LabelledFeatures(*(torch.from_numpy(np.array(_load(paths[part]))) for part in (projection, "labels")))


def _load(path: Path) -> np.ndarray:
    """Map an .npy file to memory, so that a false shape allocates nothing. Raises DamagedFileError."""
    try:
        with io.readable(path, io.ANY_SIZE, REMEDY):
            return np.load(path, "r")
    except io.DamagedFileError:
        raise
    except (OSError, ValueError, EOFError):
        raise io.DamagedFileError(path, "is not an intact .npy file", REMEDY) from None


def _allocated(path: Path, batch: np.ndarray, count: int) -> IO[bytes]:
    """Open an .npy file for `count` rows like those of `batch`, and reserve its space. Raises WriteError."""
    # A disk that is too small raises an error now, not after the last image.
    header = {"descr": np.lib.format.dtype_to_descr(batch.dtype), "fortran_order": False,
              "shape": (count, *batch.shape[1:])}  # fmt: skip
    with io.explained(path):
        file = path.open("wb")
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        os.posix_fallocate(file.fileno(), file.tell(), max(1, count * batch[0].nbytes))
    return file


def _paths(folder: Path, split: str) -> list[Path]:
    return [io.below(folder, f"{split}.{part}.npy") for part in (*PROJECTIONS, "labels")]


@dataclass(frozen=True)
class Probe:
    """Result of a linear probe.

    metrics: test metrics in percent. labels, predictions: [n], of the test samples. c: chosen C. search: validation
    metric by C. converged, iterations: those of the final fit.
    """

    metrics: dict[str, float]
    labels: Tensor
    predictions: Tensor
    c: float
    search: dict[float, float]
    converged: bool
    iterations: int


def probe(
    splits: Mapping[str, LabelledFeatures],
    class_names: Sequence[str],
    metric: Metric,
    validation_share: float,
    seed: int,
    name: str,
) -> Probe:
    """Choose C on validation, fit on train and validation, measure on test.

    splits: train, test, optionally val. metric: maximised by the choice of C; the smallest C wins a tie.
    validation_share, seed: see `LinearProbe`. name: of the dataset and features, for messages.
    """
    for split, part in splits.items():
        scoring.check_labels(part.labels, class_names, f"{name}, {split}", complete=split != "val")
        invalid = int((~torch.isfinite(part.features)).any(dim=1).sum())
        if invalid:
            raise ConfigError(
                f"{name}, {split}: {invalid} of {number_of(len(part.features), 'image')} have features that are NaN or "
                "infinite"
            )
    train, validation, test = splits["train"], splits.get("val"), splits["test"]
    if validation is None:
        is_held_out = held_out(train.labels, validation_share, seed)
        train, validation = train.rows(~is_held_out), train.rows(is_held_out)
    classes = len(class_names)
    with scoring.exact_products():
        model = LogisticRegression(train.features, train.labels, classes)
        scores = search(model, validation, classes, metric, name)
        best = min(scores, key=lambda c: (-scores[c], c))
        both_splits = LabelledFeatures(*map(torch.cat, zip(train, validation, strict=True)))
        solution = LogisticRegression(both_splits.features, both_splits.labels, classes).solve(best)
        logits = solution.logits(test.features)
    labels, predictions = test.labels.cpu(), logits.argmax(dim=1).cpu()
    metrics = accuracies(logits, test.labels)
    return Probe(metrics, labels, predictions, best, scores, solution.converged, solution.iterations)


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    """Draw a mask [n] of int(share n) samples, equally many of every class (largest remainders), from labels [n]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    sizes = torch.bincount(labels.cpu())
    shares = sizes.double() * share
    quotas = shares.long()
    remaining = int(len(labels) * share) - int(quotas.sum())
    # A class of one sample stays in train.
    remainders = torch.where(sizes > 1, shares - quotas, -1.0)
    quotas[remainders.argsort(descending=True, stable=True)[:remaining]] += 1
    shuffled = labels.cpu()[order]
    by_class = shuffled.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    rank_in_class = torch.arange(len(labels)) - starts[shuffled[by_class]]
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order[by_class[rank_in_class < quotas[shuffled[by_class]]]]] = True
    return mask.to(labels.device)


def search(
    model: LogisticRegression, validation: LabelledFeatures, classes: int, metric: Metric, name: str
) -> dict[float, float]:
    """Try seven values of C around the best so far in strides of 16, 8, 4, 2, 1 -> metric by C.

    Near an end of the grid the seven values are shifted inside, as in WPSE's released code.
    """
    scores: dict[int, float] = {}
    center, printed = len(GRID) // 2, time.perf_counter()
    for stride in STRIDES:
        middle = min(max(center, 3 * stride), len(GRID) - 1 - 3 * stride)
        for index in range(middle - 3 * stride, middle + 3 * stride + 1, stride):
            if index in scores:
                continue
            logits = model.solve(GRID[index]).logits(validation.features)
            # Top-1 is a mean of 0 and 1, rounded as in recorded searches; others are quotients of counts.
            if metric == "top1":
                right = scoring.positions(logits, validation.labels) == 0
                scores[index] = 100 * right.double().mean().item()
            else:
                scores[index] = accuracies(logits, validation.labels)[metric]
        center = min(scores, key=lambda index: (-scores[index], index))
        if time.perf_counter() - printed > SECONDS_BETWEEN_LINES:
            printed = time.perf_counter()
            best = f"C {GRID[center]:.3g} gives {scores[center]:.2f} on validation"
            say(f"evaluation: probe of {name}, stride {stride}: {best}")
    return {GRID[index]: scores[index] for index in sorted(scores)}


def accuracies(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracies in percent from logits [n, k] and labels [n], on this rank only."""
    return scoring.accuracy(scoring.positions(logits, labels), labels, logits.shape[1], World())
