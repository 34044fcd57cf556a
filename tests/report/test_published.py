"""Hyperparameters stated by the papers in the composed experiments, and results of runs with the published ones."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from clipzoo.report.render import markdown
from clipzoo.report.sections import published_tables
from clipzoo.runs.record import parsed
from tests.support.experiments import composed

PUBLISHED: dict[str, dict[str, Any]] = {
    "wpse/cc3m_gaussian": {
        "trainer": {"global_batch": 2048, "epochs": 50, "clip_gradient": None},
        "optim": {"betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.5},
        "optim.schedule": {"peak": 5e-4, "start": 1e-6, "end": 1e-5, "warmup_epochs": 2, "restart_epochs": None},
        "data": {"crop_scale": [0.5, 1.0], "interpolation": "bicubic", "flip": 0.0, "rand_augment": None},
        "head": {"embed_width": 512, "features": 1024, "evaluation_features": 512, "temperature": 0.07, "min_scale": 1,
                 "max_scale": 100, "weights": "signed", "weight_bound": 100, "reduction": "mean", "image_points": None,
                 "text_points": "all"},
        "encoder": {"image_size": 224, "context_length": 77, "mean": [0.485, 0.456, 0.406]},
        "encoder.text_tower": {"vocabulary": 49408, "width": 512, "layers": 12, "heads": 8, "quick_gelu": True,
                               "distinct_pads": True, "norm_eps": 1e-6},
        "objective": {"image_to_text": 0.5, "text_to_image": 0.5},
    },
    "wpse/cc12m_gaussian": {"trainer": {"epochs": 35}, "optim.schedule": {"warmup_epochs": 1}},
    "wpse/cc3m_linear": {"head": {"alpha": [1, 0]}},
    "wpse/cc12m_nonlinear": {"head": {"alpha": [0, 1]}},
    "wpse/cc3m_positive": {"head": {"weights": "positive"}},
    "kme/cc3m_kme": {
        "trainer": {"global_batch": 2048, "epochs": 50},
        "head": {"embed_width": 512, "gamma": 1 / (2 * 0.07), "image_points": None, "text_points": "all"},
        "encoder.text_tower": {"distinct_pads": True},
    },
    "kme/cc3m_kme_10": {"head": {"image_points": 10}},
    "kme/cc12m_kme": {"trainer": {"epochs": 50}},
    "cloob/cc3m_cloob": {
        "trainer": {"global_batch": 512},
        "optim": {"weight_decay": 0.1},
        "optim.schedule": {"peak": 1e-3, "warmup_steps": 20_000, "restart_epochs": 7},
        "data": {"crop_scale": [0.9, 1.0]},
        "encoder": {"mean": [0.48145466, 0.4578275, 0.40821073]},
        "head": {"embed_width": 1024, "inverse_temperature": 30, "beta": 8, "hopfield": True},
        "objective": {"scale": 1 / 30, "image_to_text": 1, "text_to_image": 1},
    },
    "cloob/yfcc_cloob_rn50": {
        "trainer": {"global_batch": 1024},
        "optim.schedule": {"peak": 5e-4, "warmup_steps": 10_000, "restart_epochs": 7},
        "head": {"embed_width": 1024, "inverse_temperature": 30, "beta": 14.3},
    },
    "cloob/yfcc_cloob_rn101": {"head": {"embed_width": 512}},
    "cloob/yfcc_cloob_rn50x4": {"head": {"embed_width": 640}},
    "nuclr/cc3m_nuclr": {
        "trainer": {"global_batch": 512, "epochs": 30},
        "optim": {"weight_decay": 0.02},
        "optim.schedule": {"peak": 2e-4, "per_epoch": True},
        "data": {"crop_scale": [0.5, 1.0], "flip": 0.5, "rand_augment": [2, 7]},
        "encoder": {"image_size": 256, "context_length": 30},
        "head": {"embed_width": 256, "temperature": 1, "learnable_temperature": False},
        "objective": {"temperature": 0.01, "gamma": 0.8, "zeta": -0.05, "xi": 0, "eta": 5e-6, "eta_image_factor": 0.1,
                      "momentum": 0.9, "frozen_epochs": 5, "learn_zeta": True, "positive": "xi", "xi_update": "epoch"},
    },
    "nuclr/cc12m_nuclr": {"objective": {"zeta": 0}},
    "nuclr/cc3m_nuclr_dagger": {"objective": {"learn_zeta": False}},
    "nuclr/cc3m_nuclr_diamond": {"objective": {"positive": "zeta"}},
    "nuclr/cc3m_nuclr_spade": {"objective": {"frozen_epochs": 0}},
    "nuclr/cc3m_siglip": {"head": {"temperature": 0.1}, "objective": {"initial_bias": -10}},
    "nuclr/cc3m_sogclr": {"objective": {"temperature": 0.01, "gamma": 0.8, "positive_in_denominator": False}},
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_experiment_has_the_numbers_of_its_paper(name):
    plain = composed(name)
    for node, numbers in PUBLISHED[name].items():
        part: dict[str, Any] = reduce(lambda inner, key: inner[key], node.split("."), plain)
        for key, number in numbers.items():
            expected = pytest.approx(number, rel=1e-12) if isinstance(number, float) else number
            assert part[key] == expected, f"{node}.{key}"


METRICS = {
    "zero_shot/imagenet/top1": 20.0, "zero_shot/imagenet/top1_std": 0.25, "zero_shot/imagenet/mean_per_class": 19.0,
    "zero_shot/pets/mean_per_class": 10.0, "zero_shot/pets/top1": 11.0, "zero_shot/shapes/top1": 3.0,
    "retrieval/coco/image_to_text/recall_at_1": 5.0, "retrieval/coco_paired/image_to_text/recall_at_1": 4.0,
}  # fmt: skip


def tables(metrics: dict[str, float], missing: dict[str, str], row: str | None) -> dict[str, list[str]]:
    """Lines of each table, by its title."""
    return {table.title: markdown(table).splitlines() for table in published_tables(parsed(metrics), missing, row)}


def test_each_dataset_has_the_papers_number_in_the_papers_metric():
    lines = tables(METRICS, {}, "wpse/CC3M/CLIP")["Zero-shot"]
    # Mean per class, as the paper has it; no mean over fewer datasets.
    assert {
        "| ImageNet | 20.00 ± 0.25 | 19.94 | +0.06 | wpse/1 |", "| Pets | 10.00 | 14.62 | -4.62 | wpse/1 |",
        "| CIFAR-10 |  | 59.25 |  | wpse/1 |", "| average of 13 |  | 25.03 |  | wpse/1 |",
    } <= {*lines}  # fmt: skip
    # Paired recall is not standard recall.
    lines = tables(METRICS, {}, "kme/CC3M/KME-CLIP")["Image to text"]
    assert "| MSCOCO @1 | 4.00 | 14.14 | -10.14 | kme/1 |" in lines
    # Missing datasets are named.
    lines = tables(METRICS, {"dtd": "get it", "gtsrb": "get it"}, "wpse/CC3M/CLIP")["Zero-shot"]
    assert "| DTD | missing | 13.56 |  | wpse/1 |" in lines


def test_published_numbers_need_a_row_and_a_measured_task_and_rows_are_as_wide_as_their_heads():
    scenes = {"zero_shot/shapes/top1": 3.0, "step": 5}
    assert not tables(METRICS, {}, None) and not tables(scenes, {}, "wpse/CC3M/CLIP")
    for row in ("kme/CC3M/KME-CLIP", "cloob/CC3M/CLOOB RN50 (31 epochs)", "nuclr/CC3M/NUCLR"):
        found = tables(METRICS, {"flickr30k": "x"}, row)
        assert found
        for lines in found.values():
            assert len(lines) > 2 and len({line.count("|") for line in lines}) == 1
