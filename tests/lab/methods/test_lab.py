"""The comparison lab: its settings, its judge, and trainings that go on after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import clipzoo
from clipzoo.config.compose import compose
from clipzoo.config.groups import VARIABLE
from clipzoo.errors import ConfigError
from clipzoo.lab.methods.judge import judge_scores
from clipzoo.lab.methods.lab import (
    KINDS,
    Cell,
    LabData,
    LabSettings,
    Split,
    WordTokenizer,
    cells,
    oracle,
    read_settings,
    run_lab,
    score_factor,
    settings_of,
)
from clipzoo.lab.worlds.world import VARIANTS, EnumeratedWorld
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.lock import RunLock
from clipzoo.runs.record import MetricKey, RunRecord, TrainingLog, read_arrays, revision
from clipzoo.runs.search import results_of
from tests.support.paths import ROOT
from tests.support.processes import Process

WARMUP = "optim.schedule.warmup_steps"
DEFAULT = (ROOT / "conf" / "lab" / "default.yaml").read_text()
TINY = "trainer.steps=4", f"{WARMUP}=1"


@pytest.fixture
def lab() -> LabSettings:
    """A trial and a seed of four steps, of CLIP alone."""
    settings = read_settings("default").chosen(["CLIP"], ["mixed-vit"], 1)
    (part,) = settings.comparisons
    lines = [line for line in part.methods["CLIP"] if line.partition("=")[0] not in ("trainer.steps", WARMUP)]
    world = replace(part.world, shapes=2, colours=2, train=100)
    part = replace(part, world=world, methods={"CLIP": (*lines, *TINY)})
    return replace(settings, search=replace(settings.search, trials=1), comparisons=(part,), evaluations=4)


def records(root: Path) -> dict[str, object]:
    """Results of finished trainings by path, without their durations, with curves and outcomes."""
    found = {}
    for path in sorted(root.rglob("results.json")):
        content, log = json.loads(path.read_text()), TrainingLog.read(path.parent)
        content["training"] = {name: content["training"].get(name) for name in ("ended_early", "flops", "samples")}
        outcomes = path.parent / "evaluation" / "outcomes.npz"
        arrays = read_arrays(outcomes) if outcomes.exists() else {}
        shown = {name: values.tolist() for name, values in arrays.items()}
        found[str(path.parent.relative_to(root))] = content, log.evaluations, shown
    return found


def one_cell(lab: LabSettings, root: Path) -> Cell:
    (cell,) = cells(lab, root)
    return cell


def test_a_budget_multiplies_the_steps_of_the_methods_that_claims_name(tmp_path):
    found = {part.name: part for part in read_settings("default").comparisons}
    assert [*found["one-vit"].methods] == ["CLIP", "WPSE Gaussian", "KME-CLIP"]
    assert [*found["one-vit-x10"].methods] == ["CLIP", "KME-CLIP"], "no claim is about WPSE there"
    steps = {name: [line for line in part.methods["CLIP"] if "steps=" in line] for name, part in found.items()}
    assert steps["one-vit-x3"] == ["trainer.steps=600", f"{WARMUP}=10,40,100"] and found["one-vit-x3"].budget == 3
    path = tmp_path / "mine.yaml"
    path.write_text(DEFAULT.replace("trainer.steps=200", "trainer.steps=100,200"))
    with pytest.raises(ConfigError, match=r"budgets multiply trainer.steps, and CLIP has 100,200"):
        read_settings(str(path))
    path.write_text(DEFAULT.replace("3: 3, 10: 3", "3: 1, 10: 3"))
    with pytest.raises(ConfigError, match="budgets.10=3, which must be a budget with its own search"):
        read_settings(str(path))


def test_a_budget_without_a_search_trains_the_winner_of_another(lab, tmp_path):
    (part,) = lab.comparisons
    lines = tuple(line.replace("trainer.steps=4", "trainer.steps=8") for line in part.methods["CLIP"])
    longer = replace(part, name="longer", searched=part.name, methods={"CLIP": lines}, budget=2)
    first, second = cells(replace(lab, comparisons=(part, longer), evaluations=1), tmp_path)
    assert not second.work() and not second.is_done(), "its search is another cell's, which has not run"
    while first.work():
        pass
    assert second.work() and second.is_done() and not second.work()
    assert [path.name for path in second.folder.iterdir()] == ["seed-1"]
    before, after = (config_of(cell.seeds[1]) for cell in (first, second))
    assert before["optim"] == after["optim"] and (before["trainer"]["steps"], after["trainer"]["steps"]) == (4, 8)
    with pytest.raises(ConfigError, match="--comparisons longer needs the searches of mixed-vit"):
        replace(lab, comparisons=(part, longer)).chosen([], ["longer"], None)


@pytest.mark.medium
def test_a_lab_whose_process_changes_after_every_training_has_the_trainings_of_one_process(lab, tmp_path):
    cell = one_cell(lab, tmp_path / "one")
    while cell.work():
        pass
    while one_cell(lab, tmp_path / "many").work():
        pass
    assert records(tmp_path / "one") == records(tmp_path / "many") != {}
    assert one_cell(lab, tmp_path / "many").is_done()
    assert len(list((tmp_path / "many").rglob("seed-*/results.json"))) == 1
    # Trainings are ordinary run directories.
    for run in (cell.trials[0], cell.seeds[1]):
        assert config_of(run)["data"]["shapes"] == 2 and is_finished(run)
        assert len(TrainingLog.read(run).evaluations) == lab.evaluations
        assert results_of(run)["training/steps"] == 4
        model = clipzoo.load(run)
        assert model.encode_text(model.encoder.tokenizer(["a red circle"])) is not None


@pytest.mark.slow
def test_a_killed_lab_goes_on_with_the_same_trainings(tmp_path):
    text = DEFAULT
    for before, after in (("trials: 8", "trials: 2"), ("seeds: 5", "seeds: 2"), ("steps=200", "steps=20"),
                          ("train: 4000", "train: 200"), ("shapes: 5, colours: 5", "shapes: 3, colours: 3"),
                          ("warmup_steps=10,40,100", "warmup_steps=1,2")):  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "small.yaml").write_text(text)
    chosen = "--comparisons", "mixed-vit", "--methods", "CLIP"
    words = [sys.executable, "-m", "clipzoo.cli", "lab", "small.yaml", *chosen, "--output"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, kills in (("whole", 0), ("killed", 2)):
        for _ in range(kills):
            process = subprocess.Popen([*words, name], cwd=tmp_path, env=environment)
            begun, before = time.monotonic(), len(records(tmp_path / name))
            while len(records(tmp_path / name)) <= before and time.monotonic() < begun + 100:
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
        subprocess.run([*words, name], cwd=tmp_path, env=environment, check=True)
    assert records(tmp_path / "whole") == records(tmp_path / "killed")
    assert len(records(tmp_path / "killed")) >= 3
    assert (tmp_path / "killed" / "index.html").exists()


def test_other_settings_of_a_method_have_a_folder_of_their_own(lab, tmp_path):
    other = replace(lab, search=replace(lab.search, trials=3))
    assert one_cell(lab, tmp_path).folder == one_cell(replace(lab, seeds=9), tmp_path).folder
    assert one_cell(lab, tmp_path).folder != one_cell(other, tmp_path).folder


def test_all_methods_search_the_same_ranges_of_the_optimizer():
    for part in read_settings("default").comparisons:
        for lines in part.methods.values():
            assert sum("interval" in line and line.startswith("optim.schedule.peak=") for line in lines) == 1
            assert len({line.partition("=")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tower: conv", "tower: resnet"), "there is no tower resnet in this lab: give one of vit, conv"),
        (("baseline: CLIP ", "base: CLIP "), "baseline"),
        (("rungs: [0.25, 0.5]", "rungs: [0.3]"), "must be multiples of 1 / evaluations"),
        (("better: SigLIP", "better: SigLip"), "there is no method SigLip in this lab"),
        (("several: 0.5,", ""), "worlds.mixed must have the keys shapes, colours"),
        (("partial: 0.2", "partial: 2"), "partial must be"),
    ],
)
def test_a_wrong_lab_is_one_message(change, message, tmp_path):
    assert change[0] in DEFAULT
    (tmp_path / "mine.yaml").write_text(DEFAULT.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_settings(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("value", [None, 1e30, True, [[]], {1: 2}, [{"a": 1}], {"x": {"y": [1]}}])
def test_a_lab_with_a_value_of_another_type_is_refused(tmp_path, key, value):
    content = yaml.safe_load(DEFAULT)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**content, key: value}))
    with pytest.raises(ConfigError):
        read_settings(str(tmp_path / "mine.yaml"))


def test_a_rung_written_as_a_decimal_is_a_multiple_of_one_over_the_evaluations(tmp_path):
    assert 0.58 * 50 < 29, "rounding changes it"
    changed = re.sub(r"evaluations: \d+", "evaluations: 50", DEFAULT.replace("rungs: [0.25, 0.5]", "rungs: [0.58]"))
    (tmp_path / "mine.yaml").write_text(changed)
    assert list(read_settings(str(tmp_path / "mine.yaml")).search.rungs) == [0.58]


def test_a_class_in_the_file_of_a_lab_needs_trust():
    own = ["head=clip", "head._target_=tests.support.own_parts.OwnHead"]
    with pytest.raises(ConfigError, match="OwnHead is not a class of clipzoo: add trust=tests if"):
        settings_of(own, ())
    assert settings_of(own, ["tests"])["head"]["_target_"] == "tests.support.own_parts.OwnHead"


@pytest.mark.parametrize("line", ["head._target_=payload.Head", "trust=payload", "hydra.searchpath=[pkg://payload]"])
def test_the_file_of_a_lab_imports_nothing_beside_it(line, tmp_path, monkeypatch):
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Head: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a class of clipzoo|is an option only of the command line"):
        settings_of([line, "head._target_=payload.Head"], ())
    assert not (tmp_path / "canary").exists()


@pytest.mark.medium
def test_a_head_in_a_folder_of_options_is_searched_and_trained_with_trust_in_its_package(lab, tmp_path, monkeypatch):
    (tmp_path / "conf" / "head").mkdir(parents=True)
    text = "defaults: [clip]\n_target_: tests.support.own_parts.OwnHead\n"
    (tmp_path / "conf" / "head" / "own.yaml").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "conf"))
    (part,) = lab.comparisons
    own = {"Own": tuple("head=own" if line == "head=clip" else line for line in part.methods["CLIP"])}
    lab = replace(lab, comparisons=(replace(part, methods=own),))
    with pytest.raises(ConfigError, match="OwnHead is not a class of clipzoo: add trust=tests if"):
        run_lab(lab, tmp_path)
    assert not (tmp_path / "lab.json").exists(), "before anything is trained"
    cell = one_cell(replace(lab, trust=("tests",)), tmp_path)
    while cell.work():
        pass
    (record,) = (RunRecord.read(path) for path in tmp_path.rglob("seed-*"))
    assert "head=own" in record.overrides and 0 <= record.metrics[MetricKey("test", "", "", "accuracy")] <= 100
    assert record.revision == revision()


def test_every_scale_of_a_lab_is_a_method_with_the_overrides_of_the_scale():
    lab = read_settings("scaling")
    (part,) = lab.comparisons
    assert list(part.methods)[:2] == ["CLIP, 50 steps", "CLIP, 70 steps"] and len(part.methods) == 4 * len(lab.scales)
    assert "encoder.image_width=96" in part.methods["CLIP, width 96"]
    assert sum(line.startswith("encoder.image_width=") for line in part.methods["CLIP, width 8"]) == 1


def test_an_unknown_lab_method_or_comparison_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match="there is no lab other: give a YAML file, or one of default, scaling"):
        read_settings("other")
    with pytest.raises(ConfigError, match="there is no method Clip in this lab: give one of CLIP, KME-CLIP"):
        read_settings("default").chosen(["Clip"], [], None)
    with pytest.raises(ConfigError, match="there is no comparison mixed in this lab: give one of mixed-vit"):
        read_settings("default").chosen([], ["mixed"], None)


def test_a_score_that_is_the_pmi_names_the_objects_of_every_scene():
    settings = replace(read_settings("default").comparisons[0].world, shapes=3, colours=3)
    facts = oracle(LabData(settings))
    assert facts["oracle"]["zero_shot"] == 100
    assert facts["oracle"]["error"] == pytest.approx(0, abs=1e-9)
    assert facts["oracle"]["rank_correlation"] == pytest.approx(1)
    assert facts["chance"] == pytest.approx(100 * 2 / 9)


def test_reciprocal_ranks_count_better_and_share_equal_scores():
    world = EnumeratedWorld(2, 2, VARIANTS["one"])
    split = Split(torch.empty(0), np.array([0, 1]), np.array([0, 1]))
    scores = np.zeros((2, len(world.captions)))
    scores[0, 0], scores[0, 1] = 1, 2
    _, outcomes = judge_scores(scores, np.zeros((2, 4)), world, split)
    assert outcomes["image_to_text"].tolist() == [1 / 2, 1 / 1.5]
    assert outcomes["text_to_image"].tolist() == [1, 1 / 2]


def test_the_tokenizer_knows_the_words_of_all_variants():
    tokenizer = WordTokenizer(13)
    for settings in VARIANTS.values():
        captions = EnumeratedWorld(10, 10, replace(settings, several=0.0)).captions
        assert tokenizer(captions).unique(dim=0).shape[0] == len(captions)
    with pytest.raises(ValueError, match="a word that is not in the vocabulary: unicorn"):
        tokenizer(["a unicorn"])


def test_scores_of_cosine_heads_are_divided_by_the_temperature_of_the_objective():
    assert score_factor({"head": {"max_scale": 1.0}, "objective": {"temperature": 0.05}}) == pytest.approx(20)
    assert score_factor({"head": {"max_scale": 100.0}, "objective": {}}) == 1


def test_the_remedies_are_off_by_default():
    for head, key, value in (("wpse", "initial_weight", None), ("cloob", "hopfield_start", 0)):
        assert compose(["data=demo", f"head={head}"])["head"][key] == value


@pytest.mark.medium
def test_a_training_that_another_process_holds_is_left_to_it(lab, tmp_path):
    cell = one_cell(lab, tmp_path)
    held = Process(hold, cell.trials[0], tmp_path / "held", log=tmp_path / "log")
    while not (tmp_path / "held").exists():
        time.sleep(0.05)
    assert not cell.work() and not cell.is_done()
    (tmp_path / "held").unlink()
    assert held.wait() == 0
    assert cell.work()


def hold(run: Path, held: Path) -> None:
    """Hold the lock of a run directory as long as a file exists."""
    run.mkdir(parents=True)
    with RunLock(run) as lock:
        lock.acquire()
        held.touch()
        while held.exists():
            time.sleep(0.05)


def test_a_trial_goes_on_past_a_rung_among_the_best_that_reached_it(lab, tmp_path):
    cell = one_cell(replace(lab, search=replace(lab.search, trials=3, rungs=[0.25, 0.5])), tmp_path)
    log = '{"step": 1, "event": "evaluation", "validation/accuracy": 30.0}'
    for number, training, metrics in (
        (0, {}, {"validation/accuracy": 90.0}),
        (1, {"ended_early": "stopped early"}, {"validation/accuracy": 20.0}),
    ):
        cell.trials[number].mkdir(parents=True)
        content = {"training": training, "metrics": metrics}
        (cell.trials[number] / "results.json").write_text(json.dumps(content))
    (cell.trials[0] / "metrics.jsonl").write_text(f"{log}\n")
    assert not cell._passes(2, 1, 29.0) and cell._passes(2, 1, 31.0)
    assert cell._passes(2, 2, 1.0) and cell._passes(2, 3, 1.0)
