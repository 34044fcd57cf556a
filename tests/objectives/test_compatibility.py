"""Which objective trains which head: the verdicts, their messages, and the page that lists them."""

from __future__ import annotations

import logging

import pytest

from clipzoo.config import schema
from clipzoo.errors import ConfigError
from clipzoo.heads.clip import ClipHead
from clipzoo.objectives.compatibility import check_pair, require
from clipzoo.objectives.cyclip import CyCLIP
from scripts.compatibility import PAGE, build_head, build_objective, composed, options, page, verdicts

OWN_TEMPERATURE = ("nuclr", "sogclr", "isogclr", "dcl", "cyclip")


@pytest.fixture(scope="module")
def found():
    return verdicts()


def test_the_page_says_what_the_parts_say(found):
    assert page(found) == PAGE.read_text(), "run: python scripts/compatibility.py"


def test_every_objective_of_the_configuration_has_a_verdict_with_every_head(found):
    assert set(found) == {(objective, head) for objective in options("objective") for head in options("head")}


def test_the_name_of_an_objective_is_that_of_its_configuration():
    assert {name: build_objective(name).name for name in options("objective")} == {
        name: name for name in options("objective")
    }


@pytest.mark.parametrize("objective", options("objective"))
def test_yaml_gives_every_argument_with_its_type(objective):
    assert list(schema.faults(composed(f"+objective={objective}"))) == []


def test_a_loss_of_scale_zero_is_no_loss():
    (fault,) = schema.faults(composed("+objective=infoloob", "objective.scale=0"))
    assert fault == "objective.scale must be a number above 0, not 0 (int)"


def test_infonce_trains_every_head_as_published(found):
    for head in set(options("head")) - {"cosine"}:
        assert found["infonce", head].legal and not found["infonce", head].warnings


def test_plain_cosines_without_any_temperature_are_taken_with_a_warning(found):
    for objective in set(options("objective")) - set(OWN_TEMPERATURE):
        (warning,) = found[objective, "cosine"].warnings
        assert f"{objective} has no temperature of its own" in warning and "head=clip" in warning
    own = build_objective("siglip", "objective.initial_scale=10.0")
    assert not check_pair(build_head("cosine"), own).warnings


@pytest.mark.parametrize("objective", OWN_TEMPERATURE)
def test_a_temperature_of_its_own_wants_plain_cosines(found, objective):
    assert found[objective, "cosine"].legal and not found[objective, "cosine"].warnings
    clip = found[objective, "clip"]
    assert len(clip.reasons) == 2, "the learnable temperature and the range, both at once"
    assert all(objective in reason and "head=cosine" in reason for reason in clip.reasons)


@pytest.mark.parametrize("objective", OWN_TEMPERATURE)
def test_another_head_that_gives_cosines_is_taken_with_a_warning(objective):
    verdict = check_pair(build_head("cloob", "head.inverse_temperature=1.0"), build_objective(objective))
    assert verdict.legal and "unpublished" in verdict.warnings[0]


def test_siglip_takes_the_heads_scale_or_its_own_but_not_both():
    assert check_pair(build_head("clip"), build_objective("siglip")).legal
    own = build_objective("siglip", "objective.initial_scale=10.0")
    assert check_pair(build_head("cosine"), own).legal
    assert "objective.initial_scale=null" in check_pair(build_head("clip"), own).reasons[0]


@pytest.mark.parametrize("head", ["inner_product", "distance", "kme"])
def test_infoloob_wants_bounded_scores(found, head):
    assert "no minimum" in found["infoloob", head].reasons[0]


def test_cyclip_wants_a_head_that_compares_inside_a_modality():
    class AcrossOnly(ClipHead):
        compares_within = False

    head = AcrossOnly(8, 8, 8, temperature=1.0, max_scale=1.0, learnable_temperature=False)
    (reason,) = check_pair(head, CyCLIP(0.01, False, 100.0, 0.1, 0.1)).reasons
    assert "compares images with images" in reason


def test_require_names_every_reason_in_one_error():
    with pytest.raises(ConfigError, match=r"(?s)temperature of its own.*divides cosines"):
        require(build_head("clip"), build_objective("nuclr"))


def test_require_warns_of_an_unpublished_pair_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        require(build_head("kme"), build_objective("joint"))
    assert "unpublished" in caplog.text
