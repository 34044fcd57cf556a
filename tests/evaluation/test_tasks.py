"""Tasks on a small dataset against loops over single images, and on several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from sklearn.neighbors import KNeighborsClassifier

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, LabelledSplit
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.probe import FewShot, Neighbours
from clipzoo.evaluation.suite import evaluate
from clipzoo.evaluation.task import Evaluation
from clipzoo.evaluation.zero_shot import ZeroShotClassification, build_classifiers
from clipzoo.runs.record import read_arrays
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, model_of
from tests.support.ranks import run_ranks


def measured(task, dataset: ClassificationDataset, output: Path, head: str = "clip", world: World = World()):
    evaluation = Evaluation(model_of(head), replace(batch_encoder(), world=world), 1, output)
    with torch.no_grad():
        return evaluate(evaluation, [(task, dataset)], "key", False)


@torch.no_grad()
def scores_and_features(
    dataset: ClassificationDataset, head: str = "clip"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Zero-shot scores of the test images [n, k] and features after the projection by split, one image at a time."""
    model, transform = model_of(head), Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    features = {}
    for split, samples in dataset.splits.items():
        images = [transform(samples.images[index])[None] for index in range(len(samples))]
        features[split] = torch.cat(
            [model.head.probe(model.image_features(image), "after").float() for image in images]
        )
    classifier = build_classifiers(model, dataset.class_names, dataset.templates, batch_encoder(), 1)[0]
    return torch.cat([model.similarity(model.encode_image(image), classifier) for image in images]), features


def with_labels(dataset: ClassificationDataset, **facts) -> ClassificationDataset:
    """The dataset with other facts of its test split."""
    test = dataset.splits["test"]
    split = LabelledSplit(test.images, **{"labels": test.labels, **facts})
    return replace(dataset, splits={**dataset.splits, "test": split})


def test_zero_shot_reports_groups_macro_f1_and_calibration(tmp_path):
    data = classes()
    labels = torch.tensor(data.splits["test"].labels)
    groups = [index % 3 - 1 for index in range(len(labels))]
    data = replace(with_labels(data, groups=groups), groups=("north", "south"), metric="macro_f1")
    metrics = measured(ZeroShotClassification(calibrated=True), data, tmp_path)
    scores, _ = scores_and_features(data)
    predictions = scores.argmax(1)
    top1 = [100 * (predictions == labels)[torch.tensor(groups) == group].double().mean().item() for group in (0, 1)]
    expected = 100 * f1_score(labels, predictions, average="macro", labels=labels.unique())
    assert metrics["zero_shot/colours/macro_f1"] == pytest.approx(expected)
    assert metrics["zero_shot/colours/worst_group_top1"] == pytest.approx(min(top1))
    assert metrics["zero_shot/colours/group_gap"] == pytest.approx(max(top1) - min(top1))
    arrays = read_arrays(tmp_path / "zero_shot/colours.npz", ("groups", "group_top1"))
    np.testing.assert_allclose(arrays["group_top1"], top1)
    confidence, right = scores.softmax(1).amax(1), (predictions == labels).double()
    bins = (15 * confidence).ceil()
    error = sum((confidence - right)[bins == index].sum().abs() for index in bins.unique())
    assert metrics["zero_shot/colours/ece"] == pytest.approx(100 * error.item() / len(labels), rel=1e-6)


def test_images_with_several_labels_are_right_with_any_of_them_and_have_a_mean_average_precision(tmp_path):
    data = classes()
    labels = data.splits["test"].labels
    several = [[label, (label + 1 + index % 5) % 7] for index, label in enumerate(labels)]
    scores, _ = scores_and_features(data)
    any_label = measured(ZeroShotClassification(), with_labels(data, all_labels=several), tmp_path / "any")
    right = [guess in own for guess, own in zip(scores.argmax(1).tolist(), several, strict=True)]
    assert any_label["zero_shot/colours/top1"] == pytest.approx(100 * np.mean(right))
    assert set(any_label) == {"zero_shot/colours/top1", "zero_shot/colours/top5"}

    several[4] = []
    members = np.array([[label in own for label in range(7)] for own in several])
    first = [own[0] if own else -1 for own in several]
    ranked = replace(with_labels(data, labels=first, all_labels=several), metric="mean_average_precision")
    metrics = measured(ZeroShotClassification(), ranked, tmp_path / "ranked")
    expected = average_precision_score(members, scores.numpy(), average="macro")
    assert metrics == {"zero_shot/colours/mean_average_precision": pytest.approx(100 * expected)}
    with pytest.raises(ConfigError, match="label -1"):
        ZeroShotClassification().check(replace(ranked, metric="top1"))
    with pytest.raises(ConfigError, match="several labels"):
        Neighbours(32, 5).check(ranked)


def test_nearest_neighbours_of_a_model_equal_scikit_learns(tmp_path):
    data = classes()
    metrics = measured(Neighbours(IMAGE_SIZE, 5), data, tmp_path)
    _, features = scores_and_features(data)
    train, test = (features[split].double().numpy() for split in ("train", "test"))
    peer = KNeighborsClassifier(5, metric="cosine").fit(train, data.splits["train"].labels)
    expected = 100 * np.mean(peer.predict(test) == data.splits["test"].labels)
    assert metrics["knn/colours/after/top1"] == pytest.approx(expected)
    assert set(metrics) == {
        f"knn/colours/{side}/{name}" for side in ("before", "after") for name in ("top1", "mean_per_class")
    }


@pytest.mark.medium
@pytest.mark.parametrize("head", ["clip", "kme"])
def test_few_shot_probes_of_a_model_have_an_interval_and_lp_plus_plus_needs_vectors(head, tmp_path):
    data = classes()
    metrics = measured(FewShot(IMAGE_SIZE, (1, 2), 2), data, tmp_path, head)
    protocols = ("before", "after", "lp_plus_plus")[: 3 if head == "clip" else 2]
    kinds = [f"top1_{shots}_shot{end}" for shots in (1, 2) for end in ("", "_std", "_interval")]
    assert set(metrics) == {f"few_shot/colours/{protocol}/{kind}" for protocol in protocols for kind in kinds}
    assert metrics["few_shot/colours/after/top1_2_shot"] > 100 / 7
    with pytest.raises(ConfigError, match=r"at most 6 train images of a class.*lower eval.shots"):
        FewShot(IMAGE_SIZE, (6,), 1).check(data)


def on_a_rank(output: Path) -> list[dict[str, float]]:
    world = World.from_process_group()
    groups = [index % 3 for index in range(33)]
    data = replace(with_labels(classes(), groups=groups), groups=("a", "b", "c"))
    tasks = (ZeroShotClassification(calibrated=True), Neighbours(IMAGE_SIZE, 5), FewShot(IMAGE_SIZE, (2,), 3))
    return [measured(task, data, output, world=world) for task in tasks]


@pytest.mark.slow
def test_two_ranks_measure_what_one_measures(tmp_path):
    one, two = run_ranks(1, on_a_rank, tmp_path / "one"), run_ranks(2, on_a_rank, tmp_path / "two")
    assert two == one * 2
