"""Compatibility of heads and objectives: decisions, messages, and the page that lists them."""

from __future__ import annotations

import logging

import pytest
import torch

from clipzoo.config import schema
from clipzoo.errors import ConfigError
from clipzoo.heads.vector import ClipHead
from clipzoo.objectives.base import check_pair, require
from clipzoo.objectives.cyclip import CyCLIP
from scripts.compatibility import PAGE, all_pairs, build_head, build_objective, composed, config_names, page
from tests.support.objectives import loss_of, similarity

OWN_TEMPERATURE = (
    "nuclr",
    "sogclr",
    "isogclr",
    "fastclip",
    "drrho",
    "glofnd",
    "dcl",
    "cyclip",
    "hardness",
    "amorlip",
    "neuclip",
)


@pytest.fixture(scope="module")
def pairs():
    return all_pairs()


def test_the_page_is_up_to_date(pairs):
    assert page(pairs) == PAGE.read_text(), "run: python scripts/compatibility.py"
    assert set(pairs) == {(objective, head) for objective in config_names("objective") for head in config_names("head")}


@pytest.mark.parametrize("objective", config_names("objective"))
def test_yaml_gives_every_argument_with_its_type_and_the_objectives_name(objective):
    assert list(schema.faults(composed(f"+objective={objective}"))) == []
    assert build_objective(objective).name == objective


def test_infonce_trains_every_head_as_published(pairs):
    # A paper trains cosines only with an objective's temperature, and ProLIP's Gaussians only with SigLIP.
    for head in set(config_names("head")) - {"cosine", "prolip"}:
        pair = pairs["infonce", head]
        assert pair.compatible and pair.published and not pair.warnings


def test_plain_cosines_without_a_temperature_train_with_a_warning(pairs):
    for objective in set(config_names("objective")) - set(OWN_TEMPERATURE):
        (warning,) = pairs[objective, "cosine"].warnings
        assert f"{objective} has no temperature," in warning and "head=clip" in warning
    own = build_objective("siglip", "objective.initial_scale=10.0")
    assert not check_pair(build_head("cosine"), own).warnings


@pytest.mark.parametrize("objective", OWN_TEMPERATURE)
def test_an_objective_with_a_temperature_requires_plain_cosines_of_any_head(pairs, objective):
    assert pairs[objective, "cosine"].compatible and not pairs[objective, "cosine"].warnings
    clip = pairs[objective, "clip"]
    assert len(clip.reasons) == 2, "the learnable temperature and the range, both at once"
    assert all(objective in reason and "head=cosine" in reason for reason in clip.reasons)
    pair = check_pair(build_head("cloob", "head.inverse_temperature=1.0"), build_objective(objective))
    assert pair.compatible and not pair.published


def test_siglip_uses_the_scale_of_the_head_or_its_own_but_not_both():
    assert check_pair(build_head("clip"), build_objective("siglip")).compatible
    own = build_objective("siglip", "objective.initial_scale=10.0")
    assert check_pair(build_head("cosine"), own).compatible
    assert "objective.initial_scale=null" in check_pair(build_head("clip"), own).reasons[0]


def test_infoloob_requires_bounded_scores_and_cyclip_scores_within_a_modality(pairs):
    for name in ("inner_product", "distance", "kme"):
        assert "no minimum" in pairs["infoloob", name].reasons[0]

    class AcrossOnly(ClipHead):
        compares_within = False

    head = AcrossOnly(8, 8, 8, temperature=1.0, max_scale=1.0, learnable_temperature=False)
    (reason,) = check_pair(head, CyCLIP(0.01, False, 100.0, 0.1, 0.1)).reasons
    assert "compares images with images" in reason


def test_require_reports_all_reasons_in_one_error_and_warns_about_an_unpublished_pair(caplog):
    with pytest.raises(ConfigError, match=r"(?s)its own temperature.*divides cosines"):
        require(build_head("clip"), build_objective("nuclr"))
    with caplog.at_level(logging.WARNING):
        require(build_head("kme"), build_objective("joint"))
    assert "no paper trains it" in caplog.text
    (fault,) = schema.faults(composed("+objective=infoloob", "objective.scale=0"))
    assert fault == "objective.scale must be a number from 0.001 to 1000, not 0 (int)"


@pytest.mark.parametrize("objective", config_names("objective"))
def test_a_single_sample_has_a_finite_loss_or_is_refused_because_it_has_no_negatives(objective):
    built, alone = build_objective(objective), similarity(torch.ones(1, 1), within=(torch.ones(1, 1),) * 2)
    built.allocate(5)
    if built.needs_negatives:
        with pytest.raises(ConfigError, match=rf"objective {objective} .* the global batch has 1 sample"):
            loss_of(built, alone)
    else:
        assert loss_of(built, alone).total.isfinite()
