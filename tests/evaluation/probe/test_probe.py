"""Linear probe: the grid of C, the search, held-out samples, features on disk, results and errors."""

from __future__ import annotations

import json
from functools import partialmethod

import pytest
import torch

from clipzoo.build import build_part
from clipzoo.distributed.world import World
from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.evaluation.probe import (
    GRID,
    LabelledFeatures,
    accuracies,
    held_out,
    probe,
    search,
)
from clipzoo.report.pages import write_report
from clipzoo.runs.record import RunRecord, results
from tests.support.classification import problem
from tests.support.evaluation_sets import IMAGE_SIZE, config_of, model_of, write_sets

NAMES = ["a", "b", "c", "d", "e"]


def splits() -> dict[str, LabelledFeatures]:
    features, labels = problem(samples=600)
    parts = {"train": slice(0, 300), "val": slice(300, 400), "test": slice(400, 600)}
    return {name: LabelledFeatures(features[rows], labels[rows]) for name, rows in parts.items()}


def test_the_search_finds_a_c_as_good_as_its_neighbours_and_tests_the_refitted_model():
    assert len(GRID) == 97 and GRID[9] / GRID[8] == pytest.approx(10 ** (1 / 8))
    assert GRID[0] == pytest.approx(1e-6) and GRID[48] == pytest.approx(1) and GRID[-1] == pytest.approx(1e6)
    parts = splits()
    result = probe(parts, NAMES, "top1", 0.1, 0, "data")
    model = LogisticRegression(parts["train"].features, parts["train"].labels, 5)

    def score(c):
        return 100 * (model.solve(c).logits(parts["val"].features).argmax(1) == parts["val"].labels).double().mean()

    assert {GRID[index] for index in range(0, 97, 16)} <= set(result["search"])
    for c in (min(result["search"]), result["C"], max(result["search"])):
        assert result["search"][c] == pytest.approx(score(c).item())
    center = GRID.index(result["C"])
    around = [result["search"][GRID[center + step]] for step in (-3, -2, -1, 1, 2, 3)]
    assert max(around) <= result["search"][result["C"]]
    assert result["C"] == min(c for c, value in result["search"].items() if value == result["search"][result["C"]])
    whole = LabelledFeatures(*map(torch.cat, zip(parts["train"], parts["val"], strict=True)))
    refit = LogisticRegression(whole.features, whole.labels, 5).solve(result["C"])
    top1 = 100 * (refit.logits(parts["test"].features).argmax(1) == parts["test"].labels).double().mean().item()
    assert result["metrics"]["top1"] == pytest.approx(top1)


class Peak:
    """A regression whose accuracy on validation falls with the distance of C from one value of the grid."""

    def __init__(self, best: int) -> None:
        self._best = best

    def solve(self, c: float, tolerance: float) -> Peak:
        self._right = 97 - abs(GRID.index(c) - self._best)
        return self

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        right = torch.arange(len(features)) < self._right
        return torch.stack([right.float(), torch.full_like(right, 0.5, dtype=torch.float32)], dim=1)


ONE = LabelledFeatures(torch.zeros(97, 1), torch.zeros(97, dtype=torch.int64))


def test_each_stride_tries_seven_values_that_are_moved_into_the_grid_at_its_ends(monkeypatch):
    tried = []

    def peaked_at_the_edge(self, c, tolerance):
        tried.append(GRID.index(c))
        # Correct from C = 1e5 on, index 88.
        return type("Peak", (), {"logits": lambda _, features: torch.tensor([[float(c >= 0.99e5), 0.5]])})()

    monkeypatch.setattr(LogisticRegression, "solve", peaked_at_the_edge)
    one = LabelledFeatures(torch.tensor([[1.0]]), torch.tensor([0]))
    search(LogisticRegression(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]), 2), one, 2, "top1", "data")
    assert tried[:7] == [0, 16, 32, 48, 64, 80, 96]
    # The best is 96, then 88, the smallest correct value. In strides of 8 and 4 the seven values end at 96.
    assert tried[7:] == [56, 72, 88, 76, 84, 92, 82, 86, 90, 94, 85, 87, 89, 91]


def test_the_search_tries_the_values_of_wpse_s_released_code():
    # Its windows, written out: `search_param` of rapids_linear_probe.py.
    for best in range(97):
        expected, center = set(), 48
        for stride in (16, 8, 4, 2, 1):
            if center - 3 * stride < 0:
                center = 3 * stride
            if center + 3 * stride > 96:
                center = 96 - 3 * stride
            window = range(center - 3 * stride, center + 3 * stride + 1, stride)
            expected |= set(window)
            center = min(window, key=lambda index: (abs(index - best), index))
        tried = search(Peak(best), ONE, 2, "top1", "data")
        assert {GRID.index(c) for c in tried} == expected, best


def test_a_share_of_every_class_is_held_out_as_a_function_of_the_seed():
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 55, 7, 1]))
    held = held_out(labels, 0.1, seed=3)
    assert held.sum() == len(labels) // 10
    counts = torch.bincount(labels[held], minlength=4).tolist()
    assert counts[0] == 10 and counts[1] in (5, 6) and counts[3] == 0
    assert torch.equal(held, held_out(labels, 0.1, seed=3)) and not torch.equal(held, held_out(labels, 0.1, seed=4))
    even = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 56, 8, 1]))
    assert torch.bincount(even[held_out(even, 0.5, seed=3)], minlength=4).tolist() == [50, 28, 4, 0]
    # WPSE, table 4: 128,116, 814, 368 and 306.
    for size, count in ((1_281_167, 1000), (8144, 196), (3680, 37), (3060, 102)):
        assert int(held_out(torch.arange(size) % count, 0.1, seed=0).sum()) == size // 10


def test_without_a_validation_split_c_is_chosen_on_a_share_of_train():
    parts = splits()
    del parts["val"]
    hits = {}
    for share, size in ((0.1, 30), (0.5, 150)):
        result = probe(parts, NAMES, "top1", share, 0, "data")
        hits[share] = [value * size / 100 for value in result["search"].values()]
        assert hits[share] == pytest.approx([round(count) for count in hits[share]])
    assert any(round(count) % 5 for count in hits[0.5]), "with 30 samples all counts would be multiples of 5"


def test_mean_per_class_counts_only_classes_that_validation_has():
    logits = torch.eye(3)[torch.tensor([0, 0, 1])]
    labels = torch.tensor([0, 1, 1])
    assert accuracies(logits, labels) == {"top1": pytest.approx(200 / 3), "mean_per_class": pytest.approx(75)}


def test_features_that_are_not_finite_classes_without_samples_and_labels_without_a_class_are_named():
    broken, whole = splits(), splits()
    broken["val"].features[3, 2] = float("nan")
    lacking = {**whole, "train": whole["train"].rows(whole["train"].labels != 2)}
    alone = LabelledFeatures(torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))
    for parts, names, message in (
        (broken, NAMES, "data, val: 1 of 100 images have features that are NaN or infinite"),
        (lacking, NAMES, r"data, train: 1 of 5 classes have no sample \('c'\)"),
        (whole, NAMES[:4], "data, train: label 4, but its classes are 0 to 3"),
        ({"train": alone, "test": alone}, ["a"], "nothing can be classified"),
    ):
        with pytest.raises(ValueError, match=message):
            probe(parts, names, "top1", 0.1, 0, "data")


@pytest.fixture
def evaluated(tmp_path):
    """Evaluate a small model by a linear probe and write the results; return the run directory."""
    write_sets(tmp_path / "datasets")
    plain = config_of(
        "clip", f"eval.root={tmp_path / 'datasets'}", "eval.linear_probe=[colours]", f"eval.image_size={IMAGE_SIZE}",
        "eval.batch_size=8", "eval.workers=0",
    )  # fmt: skip

    def evaluate():
        folder = tmp_path / "run"
        metrics = build_part(plain["eval"]).run(model_of("clip"), folder / "evaluation", World())
        results(folder, plain, None, [], {"steps": 1}, metrics).write(folder)
        write_report(folder)
        return folder

    return evaluate


@pytest.mark.medium
def test_a_final_fit_that_does_not_converge_is_named_in_the_log_the_results_and_the_report(
    evaluated, monkeypatch, capsys
):
    monkeypatch.setattr(LogisticRegression, "solve", partialmethod(LogisticRegression.solve, limit=1))
    folder = evaluated()
    names = ["linear_probe/colours/before", "linear_probe/colours/after"]
    assert json.loads((folder / "results.json").read_text())["not_converged"] == names
    assert RunRecord.read(folder).not_converged == tuple(names)
    assert all(f"`{name}`" in (folder / "report.md").read_text() for name in names)
    log = capsys.readouterr().err
    for projection in ("before", "after"):
        assert f"probe of colours, {projection} projection: the final fit at C=" in log
    assert "did not converge in 1 iteration; its accuracy is approximate" in log


@pytest.mark.medium
def test_the_results_of_converged_fits_do_not_mention_convergence(evaluated, capsys):
    folder = evaluated()
    assert "not_converged" not in json.loads((folder / "results.json").read_text())
    assert RunRecord.read(folder).not_converged == ()
    assert "converge" not in capsys.readouterr().err + (folder / "report.md").read_text()
