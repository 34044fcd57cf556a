"""Settings that a paper states for all its rows, compared with every experiment, and the keys of its ablations.

tests/report/test_published.py checks the full recipe of one row of each method.
"""

from __future__ import annotations

from itertools import product

import pytest

from clipzoo.report.published import experiments, read_numbers
from clipzoo.runs.identity import flat
from tests.support.experiments import EXPERIMENTS, composed

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
    for cell in read_numbers(file):
        if cell["metric"] in {"training_pairs", "seeds"}:
            continue
        for pretrain, model in product(cell["pretrain_data"].split("+"), rows):
            plain = flat(composed(experiments()[f"{paper}/{pretrain}/{model}"].name))
            assert plain[SAID[cell["metric"]]] == float(cell["value"]), (cell["metric"], pretrain, model)
