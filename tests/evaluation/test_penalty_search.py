"""The linear probe's protocol: the grid, the search, the held-out samples, the errors."""

from __future__ import annotations

import pytest
import torch

from clipzoo.evaluation.probe import penalty_search
from clipzoo.evaluation.probe.logistic import LogisticRegression
from clipzoo.evaluation.probe.penalty_search import GRID, Split, held_out, probe
from tests.support.classification import problem

NAMES = ["a", "b", "c", "d", "e"]


def splits(**changes) -> dict[str, Split]:
    features, labels = problem(samples=600)
    parts = {"train": slice(0, 300), "val": slice(300, 400), "test": slice(400, 600)}
    return {**{name: Split(features[rows], labels[rows]) for name, rows in parts.items()}, **changes}


def test_the_grid_has_97_values_from_a_millionth_to_a_million():
    assert len(GRID) == 97
    assert GRID[0] == pytest.approx(1e-6) and GRID[48] == pytest.approx(1) and GRID[-1] == pytest.approx(1e6)
    assert GRID[9] / GRID[8] == pytest.approx(10 ** (1 / 8))


def test_the_search_finds_a_c_at_least_as_good_as_its_neighbours_and_tests_on_the_refit():
    parts = splits()
    found = probe(parts, NAMES, "top1", 0.1, 0, "set")
    # By hand: the seven coarse points, then strides around the best; every value tried is in the record.
    model = LogisticRegression(parts["train"].features, parts["train"].labels, 5)

    def score(c):
        return 100 * (model.solve(c).logits(parts["val"].features).argmax(1) == parts["val"].labels).double().mean()

    assert {GRID[index] for index in range(0, 97, 16)} <= set(found.search)
    for c in (min(found.search), found.c, max(found.search)):
        assert found.search[c] == pytest.approx(score(c).item())
    place = GRID.index(found.c)
    around = [found.search[GRID[place + step]] for step in (-3, -2, -1, 1, 2, 3)]
    assert max(around) <= found.search[found.c]
    assert found.c == min(c for c, value in found.search.items() if value == found.search[found.c])
    whole = parts["train"].join(parts["val"])
    refit = LogisticRegression(whole.features, whole.labels, 5).solve(found.c)
    top1 = 100 * (refit.logits(parts["test"].features).argmax(1) == parts["test"].labels).double().mean().item()
    assert found.metrics["top1"] == pytest.approx(top1)


def test_each_stride_tries_seven_points_around_the_best_so_far_and_stays_in_the_grid(monkeypatch):
    tried = []

    def peaked_at_the_edge(self, c, *rest):
        tried.append(GRID.index(c))
        # Right from C = 1e5 on, index 88.
        return type("Peak", (), {"logits": lambda _, features: torch.tensor([[float(c >= 0.99e5), 0.5]])})()

    monkeypatch.setattr(LogisticRegression, "solve", peaked_at_the_edge)
    one = Split(torch.tensor([[1.0]]), torch.tensor([0]))
    penalty_search.search(LogisticRegression(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]), 2), one, 2, "top1", "set")
    assert tried[:7] == [0, 16, 32, 48, 64, 80, 96]
    # Around 96, cut off at the edge; then around 88, the smallest that is right, which no stride moves away from.
    assert tried[7:] == [72, 88, 76, 84, 92, 82, 86, 90, 94, 85, 87, 89, 91]


def test_a_tenth_of_every_class_is_held_out_with_the_same_seed_alike():
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 55, 7, 1]))
    held = held_out(labels, 0.1, seed=3)
    assert held.sum() == len(labels) // 10
    counts = torch.bincount(labels[held], minlength=4).tolist()
    assert counts[0] == 10 and counts[1] in (5, 6) and counts[3] == 0
    assert torch.equal(held, held_out(labels, 0.1, seed=3)) and not torch.equal(held, held_out(labels, 0.1, seed=4))


def test_half_of_every_class_is_held_out_where_the_share_is_half():
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 56, 8, 1]))
    assert torch.bincount(labels[held_out(labels, 0.5, seed=3)], minlength=4).tolist() == [50, 28, 4, 0]


def test_c_is_chosen_on_the_share_of_train_where_there_is_no_validation_split():
    parts = splits()
    del parts["val"]
    hits = {}
    for share, size in ((0.1, 30), (0.5, 150)):
        found = probe(parts, NAMES, "top1", share, 0, "set")
        hits[share] = [value * size / 100 for value in found.search.values()]
        assert hits[share] == pytest.approx([round(each) for each in hits[share]])
    assert any(round(each) % 5 for each in hits[0.5]), "of 30 samples every one would be a multiple"


@pytest.mark.parametrize(("size", "classes"), [(1_281_167, 1000), (8144, 196), (3680, 37), (3060, 102)])
def test_held_out_counts_are_those_of_the_paper(size, classes):
    # WPSE, table 4: 128,116, 814, 368 and 306.
    assert int(held_out(torch.arange(size) % classes, 0.1, seed=0).sum()) == size // 10


def test_mean_per_class_counts_only_classes_that_validation_has():
    logits = torch.eye(3)[torch.tensor([0, 0, 1])]
    labels = torch.tensor([0, 1, 1])
    assert penalty_search._metric(logits, labels, "mean_per_class") == pytest.approx(75)
    assert penalty_search._metric(logits, labels, "top1") == pytest.approx(200 / 3)


def test_features_that_are_not_finite_are_named():
    parts = splits()
    parts["val"].features[3, 2] = float("nan")
    with pytest.raises(ValueError, match="set, val: 1 of 100 images have features that are not finite"):
        probe(parts, NAMES, "top1", 0.1, 0, "set")


def test_a_class_without_training_samples_is_named():
    parts = splits()
    kept = parts["train"].labels != 2
    with pytest.raises(ValueError, match=r"set, train: 1 of 5 classes have no sample \('c'\)"):
        probe({**parts, "train": parts["train"].rows(kept)}, NAMES, "top1", 0.1, 0, "set")


def test_labels_beyond_the_classes_are_named():
    with pytest.raises(ValueError, match="set, train: label 4, but its classes are 0 to 3"):
        probe(splits(), NAMES[:4], "top1", 0.1, 0, "set")


def test_one_class_is_refused():
    features = torch.randn(20, 3)
    part = Split(features, torch.zeros(20, dtype=torch.int64))
    with pytest.raises(ValueError, match="nothing can be classified"):
        probe({"train": part, "test": part}, ["a"], "top1", 0.1, 0, "set")
