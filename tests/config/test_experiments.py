"""Every row of the papers' tables has an experiment, and every experiment is one that could be run."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from itertools import product

import pytest
import torch
import yaml

from clipzoo.build import build_head, build_model, build_objective
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF, options
from clipzoo.lab import reproduce
from clipzoo.objectives.base import check_pair
from clipzoo.report.published import (
    axes,
    differences,
    experiments,
    layout,
    not_measured,
    read_numbers,
    search_of,
    table,
    table_names,
)
from clipzoo.runs.identity import flat
from tests.support.experiments import EXPERIMENTS, composed
from tests.support.paths import ROOT

WITH_TEACHER = ("clip_kd", "datacomp_dr", "distill_open_clip", "drrho")
FOLDERS = ("wpse", "kme", "cloob", "nuclr")
HF = importlib.util.find_spec("transformers") is not None
DOWNLOADS = {
    "clipzoo.encoders.image.TimmTower": {"pretrained": False},
    "clipzoo.encoders.huggingface.HuggingFaceText": {"pretrained": None},
}
"""Arguments that keep a tower from fetching weights."""
ACCURACIES = {"top1", "top5", "mean_per_class"}
RECALLS = {"recall_at_1", "recall_at_5", "recall_at_10"}
METRICS = {"zero_shot": ACCURACIES, "linear_probe": ACCURACIES, "retrieval": RECALLS}
PROTOCOLS = {
    "zero_shot": {""},
    "linear_probe": {"before", "after"},
    "retrieval": {"image_to_text", "text_to_image", "paired_image_to_text"},
}
"""Metrics and protocols of the evaluators."""


def files():
    return [path for folder in FOLDERS for path in sorted((CONF / "experiment" / folder).glob("*.yaml"))]


def test_every_published_row_has_an_experiment_or_a_reason():
    rows = {row.name for name in table_names() for row in table(name).rows}
    without = set(layout()["without_experiment"])
    assert rows - without == set(experiments())
    assert without <= rows


def test_every_experiment_of_the_papers_names_a_row_of_its_own():
    assert sorted(f"{path.parent.name}/{path.stem}" for path in files()) == sorted(EXPERIMENTS)


@pytest.mark.medium
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_fits_the_schema(name):
    plain = composed(name)
    paper, pretrain, _ = plain["row"].split("/", 2)
    assert paper == name.split("/")[0]
    assert {"CC3M": "cc3m", "CC12M": "cc12m", "YFCC15M": "yfcc15m"}[pretrain] in plain["data"]["shards"]
    assert plain["eval"]["zero_shot"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        # scale=demo sets every key that scale=small does, so that most rows at scale=small are for the slow tests.
        pytest.param(name, scale, marks=[pytest.mark.slow] if (scale, "cc3m_clip" in name) == ("small", False) else [])
        for name in EXPERIMENTS
        if "cc12m" not in name and "yfcc" not in name
        for scale in ("small", "demo")
    ],
)
def test_an_experiment_has_three_sizes(name, scale):
    # As the experiment's title says: the demo's encoder has 16 tokens.
    about = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())["about"]
    points = re.findall(rf"with scale={scale} add ([\w.=]+)", about["title"])
    plain, full = composed(name, f"scale={scale}", *points), composed(name)
    assert plain["encoder"] == composed("wpse/cc3m_clip", f"scale={scale}")["encoder"]
    assert plain["optim"] == composed("wpse/cc3m_clip", f"scale={scale}")["optim"]
    assert plain["objective"] == full["objective"]
    changed = {key for key in full["head"] if plain["head"][key] != full["head"][key]}
    assert changed <= {"image_width", "text_width", "embed_width", *(point.split("=")[0][5:] for point in points)}


@pytest.mark.parametrize("path", files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_is_short_and_its_head_is_its_command_and_cost(path):
    text = path.read_text()
    # The rows of a paper share the settings of its first one.
    assert len(text.splitlines()) <= (12 if "  - /experiment/" in text else 20)
    experiment = EXPERIMENTS[f"{path.parent.name}/{path.stem}"]
    assert f"experiment={experiment.name}" in experiment.command
    assert experiment.hours > 0 and experiment.runs >= 1
    several = re.search(r"seed=([\d,]+)", experiment.command)
    search = re.search(r"search=(\w+)", experiment.command)
    points = len(several[1].split(",")) if several else 1
    for values in axes(search[1]).values() if search else ():
        points *= len(values)
    assert experiment.runs >= points
    assert search is None or search[1] == search_of(experiment.row).name


@pytest.mark.medium
def test_each_pair_of_head_and_objective_is_published():
    pairs = {}
    for name in EXPERIMENTS:
        plain = composed(name)
        pairs[repr((plain["head"], plain["objective"]))] = plain
    for plain in pairs.values():
        with torch.device("meta"):
            pair = check_pair(build_head(plain), build_objective(plain))
        assert pair.compatible and pair.published and not pair.warnings, plain["row"]


@cache
def check_model(nodes: str) -> None:
    """Build a model on the meta device from the nodes `encoder` and `head`, given as JSON."""
    plain = {**json.loads(nodes), "seed": 0}
    for tower in (plain["encoder"][name] for name in ("image_tower", "text_tower")):
        tower.update(DOWNLOADS.get(tower["_target_"], {}))
    with torch.device("meta"):
        model = build_model(plain)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.encoder.image_tower.width == plain["head"]["image_width"]


@pytest.mark.medium
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiments_model_is_built_on_the_meta_device(name):
    plain = composed(name)
    if "huggingface" in plain["encoder"]["text_tower"]["_target_"] and not HF:
        pytest.skip("needs pip install -e '.[hf]'")
    check_model(json.dumps({"encoder": plain["encoder"], "head": plain["head"]}))


@pytest.mark.medium
@pytest.mark.parametrize("search", layout()["searches"])
def test_a_search_varies_keys_of_its_rows_and_nothing_else(search):
    for row in layout()["searches"][search]["rows"]:
        plain = composed(experiments()[row].name)
        for key, values in axes(search).items():
            group, *rest = key.split(".")
            value = plain[group]
            for part in rest:
                value = value[part]
            assert value in values, (row, key)
    moved = [f"{key}={values[-1]}".replace(" ", "") for key, values in axes(search).items()]
    name = experiments()[layout()["searches"][search]["rows"][0]].name
    assert set(differences(composed(name, *moved), name, "paper")) == set(axes(search))


@pytest.mark.medium
def test_every_metric_of_a_table_is_measured_by_the_papers_evaluation():
    suites = {folder: composed(f"{folder}/cc3m_clip")["eval"] for folder in FOLDERS}
    for name in table_names():
        suite = suites[name.split("/")[0]]
        for column in table(name).columns:
            for key in column.keys:
                if key.task == "training" or not_measured(key):
                    continue
                assert key.dataset in suite[key.task], (name, key)
                assert suite["paired"] or not key.paired
                assert key.metric in METRICS[key.task], (name, key)
                assert key.protocol in PROTOCOLS[key.task], (name, key)


def test_the_page_of_tables_matches_the_experiments():
    assert reproduce.PAGE.read_text() == reproduce.page(), "run: python -m clipzoo.lab.reproduce --docs"


# Settings that a paper states for all its rows, and the keys of its ablations. The full recipe of one row per method
# is checked by tests/report/test_published.py.

PAPERS = {
    # Sections 6.1 and A.2.
    "wpse/": {
        "trainer.global_batch": 2048, "optim.schedule.peak": 5e-4, "optim.weight_decay": 0.5,
        "optim.betas": [0.9, 0.98], "data.crop_scale": [0.5, 1.0], "data.interpolation": "bicubic",
        "head.embed_width": 512,
        "encoder.context_length": 77, "encoder.text_tower.layers": 12, "encoder.text_tower.heads": 8,
        "encoder.text_width": 512, "eval.prompts": "slip", "eval.draws": 5,
    },
    "wpse/cc3m": {"trainer.epochs": 50},
    "wpse/cc12m": {"trainer.epochs": 35},
    # Section 5: as WPSE, on both sets alike.
    "kme/": {"trainer.global_batch": 2048, "optim.schedule.peak": 5e-4, "eval.prompts": "slip", "eval.paired": True},
    # Sections 4.1, 4.2, A.3.2 and A.3.5.
    "cloob/": {"optim.weight_decay": 0.1, "eval.prompts": "clip", "eval.probe_validation": 0.5},
    "cloob/cc3m": {"trainer.global_batch": 512, "optim.schedule.peak": 1e-3, "optim.schedule.warmup_steps": 20000},
    "cloob/yfcc": {
        "trainer.global_batch": 1024, "optim.schedule.peak": 5e-4, "optim.schedule.warmup_steps": 10000,
        "optim.schedule.restart_epochs": 7,
    },
    # Section 4; crop, flip and RandAugment of the released scripts.
    "nuclr/": {
        "data.crop_scale": [0.5, 1.0], "data.flip": 0.5, "data.rand_augment": [2, 7], "encoder.image_size": 256,
        "encoder.context_length": 30, "optim.schedule.peak": 2e-4, "optim.weight_decay": 0.02, "eval.prompts": "clip",
    },
}  # fmt: skip
HEADS = {
    "clipzoo.heads.wpse.WpseHead": {"head.features": 1024, "head.evaluation_features": 512, "head.weight_bound": 100},
    "clipzoo.heads.cloob.CloobHead": {"head.inverse_temperature": 30},
}
SAID = {
    "total_epochs": "trainer.epochs", "warmup_epochs": "optim.schedule.warmup_epochs",
    "total_batch_size": "trainer.global_batch", "epochs": "trainer.epochs", "embedding_dim": "head.embed_width",
    "weight_decay": "optim.weight_decay", "gamma": "objective.gamma", "zeta_0": "objective.zeta",
    "zeta_frozen_epochs": "objective.frozen_epochs",
}  # fmt: skip
"""Our keys of the settings among the published numbers."""


@pytest.mark.medium
@pytest.mark.parametrize("prefix", PAPERS)
def test_every_experiment_has_its_papers_numbers(prefix):
    names = [name for name in EXPERIMENTS if name.startswith(prefix)]
    assert names
    for name in names:
        plain = flat(composed(name))
        wanted = PAPERS[prefix] | HEADS.get(plain["head._target_"], {})
        assert {key: plain[key] for key in wanted} == wanted, name


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("cloob/cc3m_clip", {"trainer.epochs": 31, "optim.schedule.restart_epochs": 7, "head.temperature": 0.07}),
        ("cloob/cc3m_cloob", {"trainer.epochs": 31}),
        ("cloob/cc3m_cloob_128", {"trainer.epochs": 128, "head.beta": 8}),
        ("cloob/cc3m_cloob_no_restarts", {"trainer.epochs": 31, "optim.schedule.restart_epochs": None}),
        ("cloob/cc3m_infoloob", {"trainer.epochs": 31, "head.hopfield": False}),
        ("cloob/yfcc_cloob_rn101", {"head.beta": 14.3, "encoder.image_size": 224}),
        ("cloob/yfcc_cloob_rn50x4", {"head.beta": 14.3, "encoder.image_size": 288}),
        ("kme/cc3m_kme_50", {"head.image_points": 50, "head.text_points": "all"}),
    ],
)
def test_a_row_changes_the_keys_that_its_paper_states(name, changed):
    plain = flat(composed(name))
    assert {key: plain[key] for key in changed} == changed


@pytest.mark.medium
@pytest.mark.parametrize(
    ("file", "rows"),
    [("kme_table4_hyperparameters.csv", ["CLIP", "WPSE", "KME-CLIP"]), ("nuclr_text_numbers.csv", ["NUCLR"])],
)
def test_settings_among_the_published_numbers_are_those_of_the_rows(file, rows):
    paper = file.split("_")[0]
    for cell in read_numbers(file, ROOT / "tests" / "report" / "papers"):
        if cell["metric"] in {"training_pairs", "seeds"}:
            continue
        for pretrain, model in product(cell["pretrain_data"].split("+"), rows):
            plain = flat(composed(experiments()[f"{paper}/{pretrain}/{model}"].name))
            assert plain[SAID[cell["metric"]]] == float(cell["value"]), (cell["metric"], pretrain, model)


# The demo that trains a row of every paper.

GAUSSIAN = "wpse/CC3M/WPSE Gaussian"


@pytest.mark.medium
def test_the_demo_has_a_row_of_every_paper_at_a_point_of_its_search(tmp_path):
    jobs = reproduce.jobs_of(reproduce.ROWS, tmp_path)
    assert {row.split("/")[0] for row in jobs} == {"wpse", "kme", "cloob", "nuclr"}
    assert len({job.folder for job in jobs.values()}) == len(jobs)
    for row, overrides in reproduce.ROWS.items():
        search = search_of(row)
        for override in set(overrides) - {*reproduce.WPSE, *reproduce.CLOOB}:
            key, value = override.split("=")
            assert json.loads(value) in axes(search.name)[key]


@pytest.mark.slow
def test_finished_rows_of_the_demo_are_skipped_and_a_failed_row_is_named(tmp_path, capsys):
    jobs = reproduce.jobs_of({"wpse/CC3M/CLIP": (), GAUSSIAN: ("data.shards=nowhere",)}, tmp_path)
    done = jobs["wpse/CC3M/CLIP"]
    done.folder.mkdir()
    (done.folder / "results.json").write_text("{}")
    assert reproduce.train(jobs, 2) == [GAUSSIAN]
    assert not done.folder.with_name(f"{done.folder.name}.log").exists(), "it is not trained"
    output = capsys.readouterr().out
    assert "CLIP: finished before, skipped" in output
    assert "WPSE Gaussian: failed" in output and "nowhere" in output


@pytest.mark.parametrize("method", options("method"))
def test_a_method_is_a_sound_pair_of_head_and_objective_on_any_experiment(method):
    for experiment in ("demo/views", "emoji/clip"):
        plain = compose([f"experiment={experiment}", f"method={method}"], complete=False)
        assert plain["name"] == method and ("teacher" in plain) == (method in WITH_TEACHER)
    pair = check_pair(build_head(plain), build_objective(plain))
    assert pair.compatible and not pair.warnings
