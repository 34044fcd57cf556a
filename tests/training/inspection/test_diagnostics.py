"""What is logged and reported of a training: scores, geometry, per-sample statistics."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional

from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.report.figures import sample_histograms
from clipzoo.training import diagnostics
from clipzoo.types import PointSet
from tests.support.objectives import NUCLR_OPTIONS, batch, progress, random_cosines, similarity


def test_the_gap_is_infoloobs_bound_on_the_mutual_information():
    matrix = 5 * random_cosines(0, 6)
    values = diagnostics.similarity_diagnostics(similarity(matrix))
    rows = [matrix[i, i] - math.log(sum(math.exp(matrix[i, j]) for j in range(6) if j != i) / 5) for i in range(6)]
    assert values["gap_image_to_text"].item() == pytest.approx(sum(rows).item() / 6, rel=1e-12)
    assert values["positive_image_to_text"].item() == pytest.approx(matrix.diagonal().mean().item())


def test_only_the_first_rows_are_looked_at():
    image, text = (functional.normalize(random_cosines(seed, 9, 8), dim=1) for seed in (0, 1))
    values = diagnostics.embedding_diagnostics(image, text, rows=4)
    expected = sum(float((image[i] - text[i]).square().sum()) for i in range(4)) / 4
    assert values["alignment"].item() == pytest.approx(expected)


def test_alignment_is_zero_for_equal_views_and_four_for_opposite_ones_and_one_sample_has_no_uniformity():
    image = functional.normalize(random_cosines(0, 6, 8), dim=1)
    assert diagnostics.embedding_diagnostics(image[:1], image[:1]).keys() == {"alignment"}
    assert diagnostics.embedding_diagnostics(image, image)["alignment"].item() == pytest.approx(0, abs=1e-12)
    assert diagnostics.embedding_diagnostics(image, -image)["alignment"].item() == pytest.approx(4)


def test_uniformity_is_zero_when_collapsed_and_near_minus_four_when_spread():
    spread = torch.eye(8, dtype=torch.float64)
    collapsed = spread[[0] * 6]
    values = diagnostics.embedding_diagnostics(collapsed, collapsed)
    assert values["uniformity_image"].item() == pytest.approx(0, abs=1e-12)
    # Orthogonal vectors: every squared distance is 2.
    assert diagnostics.embedding_diagnostics(spread, spread)["uniformity_text"].item() == pytest.approx(-4)


def test_a_point_set_is_judged_by_its_weighted_mean():
    points = torch.eye(3, dtype=torch.float64)[None].expand(2, 3, 3).clone()
    first = PointSet(points, torch.tensor([[0.0, 0.0, -math.inf]] * 2, dtype=torch.float64))
    second = PointSet(points, torch.tensor([[0.0, -math.inf, -math.inf]] * 2, dtype=torch.float64))
    # 45 degrees between them.
    assert diagnostics.embedding_diagnostics(first, second)["alignment"].item() == pytest.approx(2 - math.sqrt(2))


def test_a_summary_counts_every_sample_seen_names_the_extremes_and_has_a_panel_for_each_statistic(tmp_path):
    objective = NUCLR(**NUCLR_OPTIONS)
    objective.allocate(50)
    for nothing in (InfoNCE(0.5, 0.5), objective):
        assert diagnostics.summarise_samples(nothing) == {}
    objective.zeta[1] = torch.arange(50.0) / 100
    for first in (0, 20):
        ids = range(first, first + 20)
        objective(similarity(random_cosines(first, 20).float()), batch(list(ids)), progress(0, 100, 50, 20))
    written = json.loads(json.dumps(diagnostics.summarise_samples(objective, extremes=3)))
    text = written["log_popularity_text"]
    assert text["seen"] == 40 and sum(text["counts"]) == 40
    assert [sample["sample_id"] for sample in text["highest"]] == [39, 38, 37]
    assert [sample["sample_id"] for sample in text["lowest"]] == [0, 1, 2]
    assert text["highest"][0]["value"] == pytest.approx(0.39 / NUCLR_OPTIONS["temperature"])
    # All images' popularities are still equal: a histogram of one bar.
    assert max(written["log_popularity_image"]["counts"]) == 40
    figure = sample_histograms(written)
    figure.savefig(tmp_path / "samples.png")
    assert [axes.get_xlabel() for axes in figure.axes] == ["log popularity image", "log popularity text"]
    assert (tmp_path / "samples.png").stat().st_size > 1000
