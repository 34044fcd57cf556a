"""Linear probe of a classification dataset, on the features before and after the projection."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from clipzoo import io
from clipzoo.distributed.environment import say
from clipzoo.errors import number_of
from clipzoo.evaluation.datasets.dataset import ClassificationDataset
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.evaluation.outputs import write_arrays
from clipzoo.evaluation.probe.features import PROJECTIONS, read_features, write_features
from clipzoo.evaluation.probe.search import Probe, probe
from clipzoo.io import write_json
from clipzoo.model import Model


@dataclass(frozen=True)
class LinearProbe:
    """Linear probes with these settings.

    resize: shorter side in pixels before the central crop. validation_share: share of train held out where a dataset
    has no validation split. seed: of the samples held out. keep_features: leave the features on disk.
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
        predictions of the test samples to linear_probe/<dataset>.npz. key: digest of all that the features depend on.
        """
        world, folder = encoder.world, io.below(output, f"features/{dataset.name}")
        for split, images in dataset.splits.items():
            write_features(model, images, dataset.name, split, encoder, self.resize, folder, key)
        # The solver is not distributed: ranks take projections in turn.
        own: dict[str, Probe] = {}
        for projection in PROJECTIONS[world.rank :: world.size]:
            splits = {split: read_features(folder, split, projection).to(model.device) for split in dataset.splits}
            name = f"{dataset.name}, {projection} projection"
            own[projection] = probe(splits, dataset.class_names, dataset.metric, self.validation_share, self.seed, name)
        # A large dataset keeps the solving ranks busy for longer than the timeout of collectives.
        world.barrier()
        probes = {projection: result for part in world.gather_object(own) for projection, result in part.items()}
        for projection, result in probes.items():
            if not result.converged:
                say(
                    f"evaluation: probe of {dataset.name}, {projection} projection: the final fit at C={result.c:.3g} "
                    f"did not converge in {number_of(result.iterations, 'iteration')}; its accuracy is approximate"
                )
        if world.is_first:
            content = {
                projection: {
                    "metrics": result.metrics, "C": result.c, "converged": result.converged, "search": result.search
                }
                for projection, result in probes.items()
            }  # fmt: skip
            write_json(io.below(output, f"linear_probe/{dataset.name}.search.json"), content)
            answers = {f"all_{projection}": result.predictions.numpy() for projection, result in probes.items()}
            labels = probes[PROJECTIONS[0]].labels.numpy()
            write_arrays(io.below(output, f"linear_probe/{dataset.name}.npz"), all_labels=labels, **answers)
            if not self.keep_features:
                shutil.rmtree(folder)
        return {projection: probes[projection].metrics for projection in PROJECTIONS}
