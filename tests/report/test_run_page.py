"""The page of a run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from clipzoo.build import build_part
from clipzoo.data.captions import CaptionCounts, described
from clipzoo.distributed.world import World
from clipzoo.evaluation.zero_shot import zero_shot
from clipzoo.report import figures
from clipzoo.report.figures import objective_constant, training_curves
from clipzoo.report.pages import write_report
from clipzoo.report.render import markdown
from clipzoo.report.sections import result_tables
from clipzoo.runs.record import RunRecord, TrainingLog, parsed, results
from tests.support import damage
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, config_of, model_of, write_sets
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory with a real evaluation and invented curves."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    sets = tmp_path_factory.mktemp("sets")
    write_sets(sets)
    plain = config_of(
        "clip", f"eval.root={sets}", "eval.zero_shot=[colours]", "eval.linear_probe=[colours]",
        "eval.retrieval=[things]", f"eval.image_size={IMAGE_SIZE}", "eval.batch_size=8", "eval.workers=0",
    )  # fmt: skip
    metrics = build_part(plain["eval"]).run(model_of("clip"), folder / "evaluation", World())
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    lines = [
        {"step": step, "epoch": step / 10, "loss": 4 / step, "lr": 1e-3, "surprise": step % 7, "note": "text"}
        for step in range(1, 90)
    ]
    lines.insert(40, {"step": 40, "event": "evaluation", **{key: value / 2 for key, value in metrics.items()}})
    lines.append({"step": 90, "event": "evaluation", **metrics})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 91, "loss"')
    results = {
        "experiment": "demo/clip", "row": None, "overrides": ["experiment=demo/clip"], "seed": 0, "revision": "abc",
        "versions": {"torch": "2.14"}, "training": {"steps": 90, "seconds": 120.0}, "metrics": metrics,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    write_report(folder)
    return folder


@pytest.mark.medium
def test_every_picture_of_the_page_can_be_opened_and_the_tables_hold_the_numbers_of_the_results(run):
    lines = (page := (run / "report.md").read_text()).splitlines()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    drawn = {"training", "evaluations", "confusion_colours", "mistakes_colours", "retrieval_things", "diagnosis_things"}
    assert {Path(path).stem for path in pictures} == drawn
    for path in pictures:
        with Image.open(run / path) as picture:
            # Not an empty image.
            assert min(picture.size) > 200 and np.asarray(picture.convert("L")).std() > 5
    metrics = json.loads((run / "results.json").read_text())["metrics"]
    row = next(line for line in lines if line.startswith("| colours |"))
    cells = [cell.strip() for cell in row.split("|")[2:5]]
    assert cells == [f"{metrics[f'zero_shot/colours/{key}']:.2f}" for key in ("top1", "mean_per_class", "top5")]
    row = next(line for line in lines if line.startswith("| things |"))
    assert f"{metrics['retrieval/things/text_to_image/recall_at_10']:.2f}" in row
    assert all(text in page for text in ("clipzoo train experiment=demo/clip", "InfoNCE", "2.0"))
    # Rows are as wide as their heads.
    for above, line in zip(lines, lines[1:], strict=False):
        assert not (line.startswith("|") and above.startswith("|")) or line.count("|") == above.count("|")


@pytest.mark.medium
def test_a_stopped_run_has_a_page_and_a_panel_for_unknown_numbers_but_none_for_constants_and_text(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    page = write_report(tmp_path).read_text()
    # The metrics are those of the newest evaluation.
    assert "report/training.png" in page and "Zero-shot classification" in page and "Provenance" not in page
    log = TrainingLog.read(run)
    # Without the line that a kill has cut short.
    assert len(log.training) == 89 and len(log.evaluations) == 2
    axes = figures.training_figure(log.training).axes
    assert [panel.get_title("left") for panel in axes if panel.get_visible()] == ["loss", "learning rate", "surprise"]


def test_the_validation_loss_is_drawn_beside_the_number_that_it_measures():
    lines = [{"step": step, "loss": 1.0, "objective": 2.0 / step} for step in (1, 2, 3)]
    evaluations = [{"step": step, "validation/loss": 3.0 / step} for step in (2, 3)]
    names = []
    for objective in ("infonce.InfoNCE", "nuclr.NUCLR"):
        config = {"objective": {"_target_": f"clipzoo.objectives.{objective}"}}
        name = objective_constant(config, "value_log") or "loss"
        figure = figures.training_figure(lines, "", evaluations, name)
        (panel,) = [axes for axes in figure.axes if len(axes.lines) == 2]
        assert panel.lines[1].get_xydata().tolist() == [[2, 1.5], [3, 1]]
        names.append(panel.get_title("left"))
    assert names == ["loss", "objective"]


def test_the_page_says_how_often_captions_repeat(tmp_path):
    counts = CaptionCounts({1: 2, 3: 1})
    (tmp_path / "captions.json").write_text(json.dumps(counts.figures(4)))
    line = described(counts.figures(4))
    assert "3 of 5" in line and line in write_report(tmp_path).read_text()
    (tmp_path / "captions.json").write_text("{}")
    assert "captions.json" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(("objective", "unit"), [
    ("clipzoo.objectives.infonce.InfoNCE", "nats"), ("clipzoo.objectives.siglip.SigLIP", "nats"),
    ("clipzoo.objectives.mmd.MMDJoint", ""), ("clipzoo.objectives.nuclr.NUCLR", ""),
    ("clipzoo.objectives.removed.Removed", ""), ("a_strangers_package.Objective", ""),
])  # fmt: skip
def test_only_a_loss_that_is_a_log_likelihood_is_in_nats(objective, unit):
    lines = [{"step": step, "loss": 1.0 / step, "lr": 0.1} for step in (1, 2)]
    unit_of_loss = objective_constant({"objective": {"_target_": objective}}, "loss_unit")
    assert {curve.name: curve.unit for curve in training_curves(lines, unit_of_loss)} == {"loss": unit, "lr": ""}


def test_a_deviation_follows_its_mean():
    metrics = parsed({"zero_shot/a/top1": 12.344, "zero_shot/a/top1_std": 0.5, "zero_shot/b/top1": 1.0})
    (table,) = result_tables(metrics)
    assert markdown(table).splitlines()[2:] == ["| a | 12.34 ± 0.50 |", "| b | 1.00 |"]


def test_a_model_without_mistakes_shows_none(tmp_path):
    data = classes()
    result = zero_shot(model_of("clip"), data, batch_encoder(), 32, draws=1)
    perfect = type(result)(result.metrics, result.labels, result.labels, result.margins * 0)
    (tmp_path / "evaluation" / "zero_shot").mkdir(parents=True)
    np.savez(tmp_path / "evaluation" / "zero_shot" / "colours.npz", **perfect.arrays(data))
    page = write_report(tmp_path).read_text()
    assert "confusion_colours" in page and "mistakes_colours" not in page and "predicted as" not in page


def test_missing_datasets_are_listed_with_the_command_to_get_them_and_an_empty_folder_has_a_page(tmp_path):
    assert write_report(tmp_path).read_text() == f"# {tmp_path.name}\n"
    (tmp_path / "evaluation").mkdir()
    missing = {"pets": "pets is not there. To get it: python ..."}
    (tmp_path / "evaluation" / "missing.json").write_text(json.dumps(missing))
    assert "- **pets**: `pets is not there. To get it: python ...`" in write_report(tmp_path).read_text()


FILES = ["config.yaml", "results.json", "evaluation/metrics.json", "evaluation/missing.json", "evaluation/samples.json",
         "evaluation/zero_shot/colours.npz", "evaluation/retrieval/things.npz"]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("kind", damage.KINDS)
def test_damaged_files_are_named_on_the_page(run, tmp_path, kind):
    folder = shutil.copytree(run, tmp_path / "small")
    statistic = {"seen": 1, "mean": 1.0, "counts": [1], "edges": [0, 1], "highest": [], "lowest": []}
    (folder / "evaluation" / "samples.json").write_text(json.dumps({"popularity": statistic}))
    (folder / "evaluation" / "metrics.json").write_text(json.dumps({"zero_shot/colours/top1": 1.0}))
    for name in [*FILES, "metrics.jsonl"]:
        kind(folder / name)
    section = write_report(folder).read_text().split("## Damaged files")[1].split("\n## ")[0]
    named = [line.split()[1] for line in section.splitlines() if line.startswith("- ")]
    assert named == sorted(FILES, key=section.find)


@pytest.mark.medium
def test_a_damaged_file_costs_only_its_own_part_of_the_page(run, tmp_path):
    parts = {
        "config.yaml": "- Head:", "results.json": "## Provenance",
        "evaluation/zero_shot/colours.npz": "confusion_colours", "evaluation/retrieval/things.npz": "retrieval_things",
    }  # fmt: skip
    folder = shutil.copytree(run, tmp_path / "small")
    for damaged in (list(parts)[:2], list(parts)[2:]):
        for name in damaged:
            damage.cut(folder / name)
        page = write_report(folder).read_text()
        for name, part_of_page in parts.items():
            assert (part_of_page in page) == (name not in damaged) == (f"- {name} " not in page), name
            shutil.copy(run / name, folder / name)


def write_zero_shot(run: Path, confusion: np.ndarray, names: list[str], label: int, prediction: int) -> None:
    path = run / "evaluation" / "zero_shot" / "names.npz"
    path.parent.mkdir(parents=True)
    np.savez(
        path, confusion=confusion, class_names=np.array(names), images=np.zeros((1, 8, 8, 3), np.uint8),
        labels=np.array([label]), predictions=np.array([prediction]),
    )  # fmt: skip


def test_dollar_signs_in_class_names_and_captions_do_not_end_the_report(tmp_path):
    names = ["$5 #1 and $2", "plain"]
    write_zero_shot(tmp_path, np.ones((2, 2), int), names, 0, 1)
    (tmp_path / "evaluation" / "retrieval").mkdir()
    np.savez(
        tmp_path / "evaluation" / "retrieval" / "shop.npz", captions=np.array(names), place=np.zeros(2, int),
        found=np.zeros((2, 1), int), owner=np.zeros(2, int), images=np.zeros((2, 1, 8, 8, 3), np.uint8), gallery=1,
    )  # fmt: skip
    assert "confusion_names" in write_report(tmp_path).read_text()


def test_confusions_of_many_classes_are_listed_and_not_drawn(tmp_path):
    confusion = np.diag(np.full(120, 10))
    confusion[7], confusion[9] = 0, 0
    confusion[7, 3], confusion[9, 9], confusion[9, 4] = 10, 2, 8
    write_zero_shot(tmp_path, confusion, [f"class {index}" for index in range(120)], 7, 3)
    page = write_report(tmp_path).read_text()
    assert "| class 7 | class 3 | 10 of 10 |\n| class 9 | class 4 | 8 of 10 |" in page
    assert "confusion_names" not in page


def test_provenance_is_a_command_for_a_shell_with_the_folder_of_options(tmp_path, monkeypatch):
    (tmp_path / "conf" / "experiment" / "mine").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine" / "tiny.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPZOO_CONFIG_DIR", str(tmp_path / "conf"))
    overrides = ("experiment=mine/tiny", "optim.betas=[0.9,0.95]")
    plain = {"row": None, "seed": 0, "eval": {}}
    results(tmp_path, plain, "mine/tiny", overrides, {"steps": 3}, {}).write(tmp_path)
    record = RunRecord.read(tmp_path)
    assert shlex.split(record.command) == ["clipzoo", "train", "--config-dir", "conf", *overrides]
    write_report(tmp_path)
    assert record.command in (tmp_path / "report.md").read_text()
    monkeypatch.delenv("CLIPZOO_CONFIG_DIR")
    evaluated = results(tmp_path, plain, None, ("run=a",), {"steps": 0}, {})
    assert evaluated.command == "clipzoo evaluate run=a" and evaluated.config_dir is None


def test_a_page_without_a_revision_names_the_version(tmp_path):
    """An installed package has no revision, not even in the checkout of another project."""
    record = RunRecord(overrides=("seed=1",), versions={"clipzoo": "1.2.3", "torch": None})
    page = write_report(tmp_path, record).read_text()
    assert "clipzoo 1.2.3." in page and "None" not in page
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "empty"]
    subprocess.run(["git", *commit], cwd=tmp_path, check=True)
    installed = shutil.copytree(ROOT / "clipzoo", tmp_path / "site" / "clipzoo")
    code = f"import sys; sys.path.insert(0, {str(installed.parent)!r}); from clipzoo.runs import record as r; " \
           "print(r.__file__, r.revision())"  # fmt: skip
    printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [str(installed / "runs" / "record.py"), "None"]


@pytest.mark.parametrize(("changes", "is_shown"), [
    ((), True), (("seed=3", "name=x", "data.workers=2", "data.shards=a.tar", "eval.root=b"), True),
    (("head=kme",), False), (("trainer.epochs=1",), False), (("init.weights=a.pt",), False), (("average=ema",), False),
])  # fmt: skip
def test_the_experiment_is_named_for_runs_that_do_not_depart_from_it(changes, is_shown, tmp_path):
    record = RunRecord("demo/clip", overrides=("experiment=demo/clip", *changes))
    assert ("Experiment: demo/clip" in write_report(tmp_path, record).read_text()) == is_shown


def test_running_totals_are_drawn_per_step():
    lines = [
        {"step": step, "transparent_image": total, "loss": 2.0 / step, "uniformity": -0.5 * step}
        for step, total in ((10, 4), (20, 4), (30, 24))
    ]
    curve = {curve.name: curve for curve in training_curves(lines)}
    assert curve["transparent_image"].values == (0.4, 0.0, 2.0) and "per step" in curve["transparent_image"].unit
    assert curve["uniformity"].values == (-5.0, -10.0, -15.0)


@pytest.mark.parametrize(("classes", "named"), [(20, True), (21, True), (40, True), (41, False)])
def test_a_confusion_matrix_of_up_to_forty_classes_has_their_names(classes, named):
    names = np.array([f"class {number}" for number in range(classes)])
    figure = figures.confusion_matrix({"confusion": np.eye(classes, dtype=int), "class_names": names})
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert ([label.get_text() for label in axis.get_ticklabels()] == names.tolist()) == named
