"""The page of a lab: differences, verdicts on claims, and what is said of missing trainings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clipzoo.errors import ConfigError
from clipzoo.lab.methods.page import from_baseline, pareto, read_lab, verdicts, write_page
from clipzoo.report.statistics import detectable_difference
from tests.support.lab_records import write_records, write_results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path)
    return tmp_path


def test_claims_hold_are_contradicted_left_open_or_not_measured(folder):
    said = [claim.verdict for claim in verdicts(read_lab(folder))]
    assert said == ["holds", "the opposite holds", "cannot be decided", "not measured yet", "holds"]


def test_power_says_how_many_seeds_a_difference_needs(folder):
    better, _, close, untrained, _ = verdicts(read_lab(folder))
    assert better.power.startswith("5 seeds show 3.") and better.power.endswith("points")
    # The level of the power is that of Holm's method for the smallest of four p-values.
    expected = detectable_difference(better.measured.deviation, 5, significance=0.05 / 4)
    assert better.measured.detectable == pytest.approx(expected)
    assert close.power.endswith(f"this difference needs {close.measured.seeds_needed}")
    assert close.measured.seeds_needed > 50
    assert untrained.power == ""


def test_a_claim_has_a_verdict_at_each_budget_unless_the_warmup_of_its_recipe_does_not_fit(folder):
    manifest = json.loads((folder / "lab.json").read_text())
    (first,) = manifest["comparisons"]
    # After three times the steps, better and worse have changed places.
    places = {"better": "worse", "worse": "better"}
    methods = [{**item, "folder": places.get(item["name"], item["folder"])} for item in first["methods"]]
    manifest["comparisons"].append({**first, "name": "one-x3", "budget": 3, "steps": 6, "methods": methods})
    better, worse, *_ = manifest["claims"]
    manifest["claims"] = [better, {**worse, "warmup": 4}]
    (folder / "lab.json").write_text(json.dumps(manifest))
    found = [(item.claim["better"], item.steps, item.verdict) for item in verdicts(read_lab(folder))]
    assert found == [
        ("better", 2, "holds"), ("better", 6, "the opposite holds"),
        ("worse", 2, "the warm-up does not fit"), ("worse", 6, "holds"),
    ]  # fmt: skip
    page, _ = write_page(folder, None, "clipzoo lab")
    text = page.read_text()
    assert "better - CLIP on one between 2 and 6 steps; worse - CLIP on one between 2 and 6 steps." in text
    assert "a warm-up of 4 steps" in text and (folder / "lab" / "budgets.png").exists()


def test_differences_from_the_baseline_are_marked_where_they_are_separated(folder):
    found = {item.label: item for item in from_baseline(read_lab(folder))}
    assert {name: item.is_separated for name, item in found.items()} == {"better": True, "worse": True, "close": False}
    assert found["better"].interval.estimate == pytest.approx(10)
    assert found["close"].samples is not None


def test_the_front_holds_methods_that_no_cheaper_one_surpasses(folder):
    (compared,) = read_lab(folder).comparisons
    assert [method.name for method in pareto(compared.methods, "flops")] == ["CLIP", "better", "worse", "close"]
    assert [method.name for method in pareto(compared.methods, "samples")] == ["better"]


def test_a_diverged_training_is_counted_and_a_damaged_record_left_out(folder):
    write_results(folder / "better" / "seed-1", {"seed": 1, "training": {"ended_early": "NaN"}, "metrics": {}})
    (folder / "worse" / "seed-1" / "results.json").write_text("{")
    for seed, change in ((1, {"training": {"flops": "many"}}), (2, {"metrics": {"test/accuracy": 1.0}})):
        path = folder / "close" / f"seed-{seed}" / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (compared,) = read_lab(folder).comparisons
    assert (len(compared.method("better").seeds), compared.method("better").failed) == (4, 1)
    assert len(compared.method("worse").seeds) == 4 and len(compared.method("close").seeds) == 3
    assert compared.missing == ("untrained",)


FUZZ = [None, True, -1, [], {}, [None], "", "../up", "x" * 300, 10**400, float("nan"), 1e308, {"a": 1}]
"""Values that are put at every place of the files of a lab."""


def places(node: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield the places of all values in a JSON file, and the values; of lists only the first one."""
    if place:
        yield place, node
    for key in node if isinstance(node, dict) else range(len(node[:1])) if isinstance(node, list) else ():
        yield from places(node[key], (*place, key))


def kind(value: object) -> type:
    return float if type(value) is int else type(value)


def changed(content: dict, place: tuple[str | int, ...], value: object) -> str:
    """The JSON text of `content` with another value at a place."""
    content = node = json.loads(json.dumps(content))
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_any_value_in_the_files_of_a_lab_is_read_or_is_one_message_with_file_and_key(folder, every, caplog):
    for method in ("worse", "close"):
        shutil.rmtree(folder / method)
    run, faults = folder / "CLIP" / "seed-1", []
    for path in (folder / "lab.json", run / "results.json", run / "metrics.jsonl"):
        intact = path.read_text()
        content = json.loads(intact.splitlines()[0])
        cases = [(place, was, value) for place, was in places(content) for value in FUZZ]
        for place, was, value in cases[::every]:
            path.write_text(changed(content, place, value) + intact[len(intact.splitlines()[0]) :])
            caplog.clear()
            refused = path.name == "lab.json" and "points" not in place and place != ("name",)
            try:
                lab = read_lab(folder)
                from_baseline(lab), verdicts(lab), [method.steps for method in lab.comparisons[0].methods]
            except ConfigError as error:
                if path.name != "lab.json" or str(folder) not in str(error) or "\n" in str(error):
                    faults.append((place, value, str(error)))
            except Exception as error:
                faults.append((place, value, repr(error)))
            else:
                faults += [(place, value, line) for line in caplog.messages if str(path) not in line]
                if refused and not (kind(value) is kind(was) and value == value):
                    faults.append((place, value, "is accepted"))
        path.write_text(intact)
    assert not faults


@pytest.mark.parametrize(
    "arrays", [{}, {"zero_shot": np.ones(3)}, {"zero_shot": np.ones((50, 2))}, {"zero_shot": np.full(50, np.nan)},
               {"zero_shot": np.array(["a"] * 50)}, {"zero_shot": np.ones(50), "other": np.ones(4)}]
)  # fmt: skip
def test_a_run_with_outcomes_of_other_samples_is_left_out_with_a_warning(folder, arrays, caplog):
    path = folder / "CLIP" / "seed-2" / "evaluation" / "outcomes.npz"
    np.savez(path, **arrays)
    (compared,) = read_lab(folder).comparisons
    assert len(compared.method("CLIP").seeds) == 4
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]


def test_a_folder_without_a_lab_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="holds no lab: run clipzoo lab --output"):
        read_lab(tmp_path)


@pytest.mark.medium
def test_the_page_is_one_file_of_html_and_markdown_with_pictures_beside_it(folder, tmp_path):
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    (tmp_path / "docs" / "lab" / "notes.txt").write_text("A\nnote.\n")
    page, index = write_page(folder, tmp_path / "docs" / "lab.md", "clipzoo lab")
    text, shown = page.read_text(), index.read_text()
    assert "20 of 25 trainings of winners are done" in text
    assert "Not trained yet: untrained." in text
    assert shown.count("data:image/png") == text.count("](lab/") == 4
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if "](lab/" in line]
    assert all((page.parent / picture).exists() for picture in pictures)
    assert "A note." in text and "A note." in shown
    assert "peak=0.00123" in text, "the point that the winners have"
    assert "A &lt;lab&gt;" in shown
    assert "Winners trained at a revision that the records do not name; page made at" in text and "trained at" in shown


def test_the_revisions_that_trained_the_winners_are_read_from_their_records(folder):
    for seed, name in ((1, "abc"), (2, "abc"), (3, "def+")):
        path = folder / "CLIP" / f"seed-{seed}" / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "revision": name}))
    (compared,) = read_lab(folder).comparisons
    revisions = {seed.record.revision for method in compared.methods for seed in method.seeds}
    assert revisions == {None, "abc", "def+"}
