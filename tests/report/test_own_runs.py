"""Comparison of runs that belong to no paper's row."""

from __future__ import annotations

from math import comb
from pathlib import Path

import numpy as np
import pytest

from clipzoo.io import DamageLog
from clipzoo.report.frame import Comparison, comparison_rows, read_frame
from clipzoo.report.pages import write_pages
from clipzoo.report.sections import separation_table, settings_table
from clipzoo.report.statistics import (
    detectable_difference,
    differences_of,
    disagreements,
    mcnemar,
    paired_difference,
    sign_flip,
    welch,
)
from tests.support.evaluation_sets import COLOURS, write_sets
from tests.support.paper_runs import write_run

TOP1 = "zero_shot/colours/top1"


def own_run(root: Path, top1: float, *overrides: str) -> Path:
    return write_run(root, "demo/clip", {TOP1: top1}, *overrides, pairs=2000, evaluations=3)


def leave_answers(run: Path, task: str, dataset: str, **arrays: object) -> None:
    """Write the answers of an evaluation as the evaluation does."""
    path = run / "evaluation" / task / f"{dataset}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def two_heads(root: Path, key: str, values: dict[str, float]) -> dict[str, Path]:
    """A run for each head, with one metric."""
    return {
        head: write_run(root, "demo/clip", {key: value}, f"head={head}", f"name={head}", pairs=2000)
        for head, value in values.items()
    }


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """Two seeds of CLIP, a KME run and an evaluation set; KME is right on two samples more, and wrong on one."""
    write_sets(tmp_path / "sets")
    root = f"eval.root={tmp_path / 'sets'}"
    seeds = [own_run(tmp_path / "runs", 40.0 + 2 * seed, root, f"seed={seed}", f"name=clip-{seed}") for seed in (0, 1)]
    kme = own_run(tmp_path / "runs", 60.0, root, "head=kme", "name=kme")
    for run, predictions in ((seeds[0], [0, 0, 0, 3, 0]), (kme, [0, 1, 2, 0, 0])):
        answers = {"all_labels": range(5), "all_predictions": predictions}
        leave_answers(run, "zero_shot", "colours", class_names=list(COLOURS), **answers)
    return [*seeds, kme]


def compared_at(root: Path) -> Comparison:
    return Comparison(comparison_rows(read_frame([root])), DamageLog())


def test_seeds_are_one_row_and_rows_are_labelled_by_directory_with_the_settings_that_differ(folders):
    compared = compared_at(folders[0].parent)
    rows = compared.frame.drop_duplicates("group")
    assert rows["label"].to_list() == ["clip-0 (2 seeds)", "kme"]
    assert "head=ClipHead" in rows["note"].iloc[0] and "head=KmeHead" in rows["note"].iloc[1]
    assert compared.means["mean"].to_list() == [41.0, 60.0]
    settings = {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in settings_table(compared.frame).rows}
    assert settings["head"] == ["ClipHead", "KmeHead"]
    assert settings["head.temperature"][1] == "" and settings["head.gamma"][0] == ""
    assert not {"seed", "name", "objective", "encoder"} & settings.keys()


def test_single_runs_are_compared_on_their_samples_and_their_disagreements_are_counted_and_tested(folders):
    compared = compared_at(folders[0].parent)
    (difference,) = differences_of(compared, DamageLog())
    before, after = np.array([1, 0, 0, 1, 0]), np.array([1, 1, 1, 0, 0])
    assert difference.basis == "5 samples" and difference.p == mcnemar(before, after) and not difference.is_separated
    assert difference.interval == paired_difference(100.0 * before, 100.0 * after)
    table = separation_table([difference], compared.frame["label"].iloc[0])
    assert table.title == "Differences from clip-0 (2 seeds), in percent points"
    assert [cell.text for cell in table.rows[0].cells[:3]] == ["zero-shot top-1, colours", "kme", "+20.0"]
    (pair,) = disagreements(compared.frame, DamageLog())
    assert all(map(np.array_equal, pair.right, (before == 1, after == 1)))
    # McNemar's exact test: both tails of a fair coin that shows heads at most once in three throws.
    assert pair.p_value == pytest.approx(min(1.0, 2 * sum(comb(3, count) for count in (0, 1)) / 2**3))
    images = np.zeros((1, 1, 1, 3), np.uint8)
    leave_answers(folders[0], "zero_shot", "colours", class_names=list(COLOURS), images=images)
    assert not list(disagreements(compared.frame, DamageLog()))


@pytest.mark.medium
def test_the_page_of_named_runs_compares_them_whatever_their_rows(folders, tmp_path, blank_pictures):
    row = write_run(tmp_path / "papers", "wpse/cc3m_clip", {TOP1: 20.0})
    index = write_pages([*folders, row], [], tmp_path / "out")
    text = (tmp_path / "out" / "tables.md").read_text()
    assert text.startswith("# Comparison of runs")
    assert "| runs/kme (" in text and f"| papers/{row.name} (" in text
    assert "| zero-shot colours | clip-0 | kme | 1 | 1 | 2 | 1 | 1 |" in text
    assert "zero-shot colours: one run right, the other wrong" in index.read_text()
    assert "\nruns,,runs/kme," in (tmp_path / "out" / "tables.csv").read_text()


@pytest.mark.medium
def test_the_trials_of_a_search_have_the_given_names_and_no_test_of_their_differences(
    folders, tmp_path, blank_pictures
):
    labels = {folder: f"head={folder.name}" for folder in folders}
    selected, tested = (
        write_pages(folders, [], tmp_path / str(flag), labels=labels, tested=flag).with_name("tables.md").read_text()
        for flag in (False, True)
    )
    for words in ("p (Holm)", "separated", "one run classifies correctly", "95 %"):
        assert words in tested and words not in selected
    assert "| head=kme | 60.00 |" in selected and "| head=clip-0 (2 seeds) |" in selected


def test_differences_between_several_seeds_are_welchs_adjusted_for_all_rows(tmp_path):
    results = {"a": (40.0, 42.0, 41.0), "b": (60.0, 61.0, 62.0), "c": (41.0, 40.5, 42.5)}
    for width, (name, values) in enumerate(results.items(), 1):
        for seed, top1 in enumerate(values):
            own_run(tmp_path, top1, f"head.embed_width={64 * width}", f"seed={seed}", f"name={name}-{seed}")
    far, near = differences_of(compared_at(tmp_path), DamageLog())
    interval, p = welch(results["a"], results["b"])
    assert far.interval == interval and far.p == 2 * p and far.is_separated
    assert near.p == welch(results["a"], results["c"])[1] and not near.is_separated
    assert far.basis == "3 and 3 seeds" and far.detectable == detectable_difference(1.0, 3, significance=0.05 / 2)


def test_captions_of_one_picture_are_resampled_together(tmp_path):
    answers = {"clip": np.array([0, 1, 0, 2, 5, 0]), "kme": np.array([0, 0, 0, 0, 0, 3])}
    owners = np.array([0, 0, 1, 1, 2, 2])
    accuracies = {head: 100 * float(np.mean(places == 0)) for head, places in answers.items()}
    for head, run in two_heads(tmp_path, "retrieval/things/text_to_image/recall_at_1", accuracies).items():
        leave_answers(run, "retrieval", "things", all_places=answers[head], all_owners=owners, gallery=3)
    (difference,) = differences_of(compared_at(tmp_path), DamageLog())
    change = (answers["kme"] == 0).astype(float) - (answers["clip"] == 0)
    assert difference.basis == "6 captions of 3 images" and difference.p == sign_flip(change, owners)
    for head in answers:  # without owners
        leave_answers(tmp_path / head, "retrieval", "things", all_places=np.zeros(4), gallery=3)
    assert differences_of(compared_at(tmp_path), DamageLog()) == []


@pytest.mark.parametrize(("key", "arrays"), [
    ("retrieval/things/image_to_text/recall_at_1", lambda right: {"all_image_places": 1 - right, "gallery": 5}),
    ("linear_probe/things/after/top1", lambda right: {"all_after": right, "all_labels": np.ones(5)}),
])  # fmt: skip
def test_images_and_probes_of_single_runs_are_paired_by_mcnemars_test(key, arrays, tmp_path):
    answers = {"clip": np.array([0, 1, 1, 0, 0]), "kme": np.ones(5, int)}
    for head, run in two_heads(tmp_path, key, {head: 20.0 * right.sum() for head, right in answers.items()}).items():
        leave_answers(run, key.partition("/")[0], "things", **arrays(answers[head]))
    (difference,) = differences_of(compared_at(tmp_path), DamageLog())
    assert difference.basis == "5 samples" and difference.interval.estimate == 60
    assert difference.p == mcnemar(answers["clip"], answers["kme"])
