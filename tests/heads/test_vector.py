"""Heads of vectors against their formulas: CLIP, cosines, inner products and distances; and factors of all of them."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Scope
from clipzoo.heads.vector import projection
from tests.support.heads import (
    HEADS,
    assert_same_values_and_gradients,
    build_head,
    image_features,
    scored,
    text_features,
)

VECTOR_HEADS = [name for name in HEADS if hasattr(build_head(name), "factors")]
TEMPERATURE = 0.3
FORMULAS = {
    "clip": lambda u, v: (u * v).sum() / (u.square().sum() * v.square().sum()).sqrt() / TEMPERATURE,
    "inner_product": lambda u, v: (u * v).sum() / TEMPERATURE,
    "distance": lambda u, v: -(u - v).square().sum() / (2 * TEMPERATURE),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_equal_the_formula_and_prompts_are_averaged(name):
    head, image, text = build_head(name, f"head.temperature={TEMPERATURE}"), image_features(3), text_features(4)
    rows = [
        torch.stack([FORMULAS[name](u, v) for v in text.pooled @ head.text_projection])
        for u in image.pooled @ head.image_projection
    ]
    expected = torch.stack(rows)
    if name == "clip":  # the scale is a parameter, whose initial value is rounded to float32
        expected = expected * TEMPERATURE * head.log_scale.exp()
    assert_same_values_and_gradients(head, scored(head, image, text), expected)
    prompts = head.embed_text(text)
    mean = sum(prompts) / 4
    torch.testing.assert_close(head.ensemble(prompts)[0], mean / mean.norm() if name == "clip" else mean)
    if name == "distance":
        within = head.score(prompts, prompts)
        assert within.diagonal().abs().max() < 1e-13
        assert (within[~torch.eye(4, dtype=torch.bool)] < -0.1).all()


def test_temperature_starts_at_seven_hundredths_and_is_clamped_and_projections_start_normal():
    head = build_head("clip")
    assert head.logs()["temperature"].item() == pytest.approx(0.07)
    for value, scale in ((9.0, 100.0), (-9.0, 1.0)):
        head.log_scale.data.fill_(value)
        head.clamp_()
        assert head.log_scale.exp().item() == pytest.approx(scale)
    drawn = projection(400, 500)
    assert drawn.std().item() == pytest.approx(400**-0.5, rel=0.02) and drawn.mean().abs() < 1e-3


@pytest.mark.parametrize("temperature", [0.009, 1.5])
def test_a_learnable_temperature_starts_within_its_bounds_and_a_fixed_one_has_none(temperature):
    with pytest.raises(ConfigError, match=rf"temperature={temperature}, max_scale=100"):
        build_head("clip", f"head.temperature={temperature}")
    fixed = build_head("clip", f"head.temperature={temperature}", "head.learnable_temperature=false")
    fixed.clamp_()
    assert fixed.logs()["temperature"].item() == pytest.approx(temperature)


def test_plain_cosines_learn_the_projections_alone():
    head = build_head("cosine")
    assert [key for key, parameter in head.named_parameters() if parameter.requires_grad] == [
        "image_projection",
        "text_projection",
    ]
    assert head.score_range == (-1.0, 1.0) and not head.learnable_temperature
    image = head.embed_image(image_features(3))
    torch.testing.assert_close(head.score(image, image).diagonal(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_factors_multiply_to_the_score_and_each_row_stands_alone(name):
    others = {name.split()[0] for name in HEADS} - {name.split()[0] for name in VECTOR_HEADS}
    assert others == {"kme", "meru", "hycoclip", "filip", "flair", "llip"}
    head = build_head(name)
    image, text = head.embed_image(image_features(4)), head.embed_text(text_features(3))
    left, right = head.factors(image, text)
    # Distances are computed in another order than the product of their factors.
    torch.testing.assert_close(left @ right.mT, head.score(image, text), rtol=1e-13, atol=1e-13)
    first_left, last_right = head.factors(image[:1], text[2:])
    assert torch.equal(first_left, left[:1]) and torch.equal(last_right, right[2:])


@pytest.mark.parametrize("name", ["inner_product", "distance"])
def test_null_embedding_width_uses_the_pooled_features_and_needs_equal_widths(name):
    head = build_head(name, "head.embed_width=null", "encoder.text_width=12")
    image = image_features(3)
    assert list(head.parameters()) == []
    assert torch.equal(head.embed_image(image), image.pooled) and torch.equal(head.probe(image, "after"), image.pooled)
    with pytest.raises(ConfigError, match="image_width=12, text_width=10: without projections"):
        build_head(name, "head.embed_width=null")


@pytest.mark.parametrize(("bits", "error"), [(10, 0.05), (7, 0.5)])
def test_distance_is_exact_under_low_precision_products(bits, error):
    """tf32 and bf16, which GPUs multiply in: vectors of norm 23, whose rounded squares alone would be wrong by more."""
    drawn = torch.Generator().manual_seed(0)
    image = torch.randn(64, 512, generator=drawn)
    text = image + 0.3 * torch.randn(64, 512, generator=drawn)
    for temperature in (1.0, 0.7):
        head = build_head("distance", f"head.temperature={temperature}").float()
        left, right = (rounded(factor, bits).double() for factor in head.factors(image, text))
        exact = -(torch.cdist(image.double(), text.double()) ** 2) / (2 * temperature)
        assert (left @ right.mT - exact).abs().max() < error


@pytest.mark.parametrize("norm", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("spread", ["near a common vector", "in all directions, pairs near each other"])
@pytest.mark.parametrize("width", [8, 512])
def test_distances_in_float32_equal_float64_at_large_norms(norm, spread, width):
    drawn = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(48, width, generator=drawn), dim=1)
    image = norm * (directions[:1] if spread.startswith("near") else directions).expand(48, -1)
    image = image + torch.randn(48, width, generator=drawn) / width**0.5
    text = image + torch.randn(48, width, generator=drawn) / width**0.5
    head = build_head("distance", f"head.temperature={TEMPERATURE}").float()
    pairs = [vectors.clone().requires_grad_() for vectors in (image, text)]
    exact = [vectors.double().requires_grad_() for vectors in (image, text)]
    upstream = torch.randn(48, 48, generator=drawn)
    scores = head.score(*pairs)
    expected = -(exact[0][:, None] - exact[1]).square().sum(dim=2) / (2 * TEMPERATURE)
    # Within the rounding of the result itself.
    torch.testing.assert_close(scores.double(), expected, rtol=2e-7, atol=1e-9)
    (scores * upstream).sum().backward()
    (expected * upstream.double()).sum().backward()
    for vectors, reference in zip(pairs, exact, strict=True):
        scale = reference.grad.abs().max()
        assert (vectors.grad - reference.grad).abs().max() < 2e-6 * scale


def test_tiles_of_distances_equal_the_matrix_at_large_norms():
    drawn = torch.Generator().manual_seed(0)
    base = 100 * torch.nn.functional.normalize(torch.randn(1, 16, generator=drawn), dim=1)
    image, text = (base + torch.randn(24, 16, generator=drawn) for _ in range(2))
    head = build_head("distance").float()
    matrix, tiles = (head.similarity(image, text, Scope(tile=tile)) for tile in (None, 7))
    for one, other in zip(
        (matrix.image_to_text, matrix.text_to_image), (tiles.image_to_text, tiles.text_to_image), strict=True
    ):
        torch.testing.assert_close(other.log_sum_exp(), one.log_sum_exp(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(other.positives(), one.positives(), rtol=1e-6, atol=1e-5)


def rounded(vectors: torch.Tensor, bits: int) -> torch.Tensor:
    """To so many bits of mantissa."""
    mantissa, exponent = torch.frexp(vectors)
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)
